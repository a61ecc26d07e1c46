"""From a tree to checked models: every fault is noted, each with its place, and nothing stops at the first.

A group is checked from the inside out: its inner groups become models first, then pydantic judges the group
itself, so that each of its complaints is about one key of one group and fits into one line.
"""

from typing import Any

from pydantic import BaseModel, ValidationError

from twofold.config.explain import explain, sentence_for_kind
from twofold.config.names import hint_for_key
from twofold.config.schema import DEFAULT_KIND, Config, Methods, all_keys, kinds, members
from twofold.config.tree import Fault, KeyPath, Tree, show

VERSION = 1


class Checker:
    """Builds the models of one tree; `tree.faults` gets what is wrong."""

    def __init__(self, tree: Tree, methods: Methods) -> None:
        self.tree, self.methods = tree, methods
        self.everywhere = all_keys(methods)

    def config(self) -> Config | None:
        """The whole configuration, or None if anything is wrong."""
        if "version" not in self.tree.values:
            text = f"version: missing. Add the line 'version: {VERSION}'."
            self.tree.faults.append(Fault(self.tree.root, text))
        built = self.group(Config, self.tree.values, ())
        return built if isinstance(built, Config) and not self.tree.faults else None

    def group(
        self, model: type[BaseModel], values: dict[str, Any], path: KeyPath, arms_here: Methods | None = None
    ) -> BaseModel | None:
        """The group at `path` as a model; None, with the faults noted, if it is wrong."""
        ready, inner = self.known_values(model, values, path, arms_here or {}), set()
        for name, field in model.model_fields.items():
            arms = kinds(name if not path else "", field, self.methods)
            absent = name not in values and not field.is_required()
            if not arms or absent or (field.default is None and _is_none(values.get(name))):
                continue
            inner.add(name)
            built = self.inner(arms, values.get(name), (*path, name))
            ready.pop(name, None)
            if built is not None:
                ready[name] = built
        try:
            return model.model_validate(ready)
        except ValidationError as error:
            for name, text in explain(model, error, ready).items():
                if name in ready or name not in inner:  # an inner group that failed has said so itself
                    self.tree.fault((*path, name) if name else path, text)
            return None

    def known_values(
        self, model: type[BaseModel], values: dict[str, Any], path: KeyPath, arms: Methods
    ) -> dict[str, Any]:
        """The values of the group's own keys; the others are noted as unknown."""
        known = {}
        for name, value in values.items():
            here = (*path, name)
            if name in model.model_fields:
                known[name] = self.as_typed(model.model_fields[name].annotation, value, here)
            else:
                with_it = [kind for kind, arm in arms.items() if name in arm.model_fields]
                hint = f"It belongs to kind {' and '.join(map(repr, with_it))}. " if with_it else ""
                hint = hint or hint_for_key(name, value, list(model.model_fields), self.everywhere)
                keys = ", ".join(sorted(model.model_fields))
                self.tree.fault(here, f"unknown key. {hint}Keys here: {keys}.")
        return known

    def as_typed(self, annotation: Any, value: Any, path: KeyPath) -> Any:
        """The text of an override for a field that takes text: a shell cannot quote `run.name=42`."""
        raw = self.tree.origin(path).raw if path in self.tree.origins else None
        accepted = members(annotation)
        if raw is None or str not in accepted or value is None or type(value) in accepted:
            return value
        return value if isinstance(value, list) or raw.startswith("{") else raw

    def inner(self, arms: Methods, value: Any, path: KeyPath) -> BaseModel | None:
        """The group at `path`, which may be of several kinds."""
        if value is None and "" not in arms:
            self.tree.fault(path, f"missing. {sentence_for_kind(path[-1], arms)}")
            return None
        if isinstance(value, str) and "" not in arms:
            value = {"kind": value}
        if value is not None and not isinstance(value, dict):
            model = next(iter(arms.values()))
            keys = ", ".join(sorted(model.model_fields))
            self.tree.fault(path, f"expected a group of keys, got {show(value)}. Keys here: {keys}.")
            return None
        kind = self.kind(arms, value or {}, path)
        return None if kind is None else self.group(arms[kind], value or {}, path, arms)

    def kind(self, arms: Methods, values: dict[str, Any], path: KeyPath) -> str | None:
        """The kind that the group is of; None, with a fault noted, if that is unknown."""
        if "" in arms:
            return ""
        if "kind" in values:
            kind = values["kind"]
            if isinstance(kind, str) and kind in arms:
                return kind
            text = f"{'.'.join(path)}: unknown kind {show(kind)}. {sentence_for_kind(kind, arms)}"
            self.tree.faults.append(Fault(self.tree.origin((*path, "kind")), text))
            return None
        default = DEFAULT_KIND.get(path[-1], "")
        if len(arms) == 1:
            default = next(iter(arms))
        fitting = [kind for kind, arm in arms.items() if set(values) <= set(arm.model_fields)]
        if default in fitting or (not fitting and default in arms):
            return default
        has = f" 'kind: {fitting[0]}' has these keys." if fitting else ""
        self.tree.fault(path, f"needs a kind ({' | '.join(sorted(arms))}).{has}")
        return None


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
