"""Writes a configuration: all of it as YAML that `load` reads back, and its shape as a JSON schema."""

from collections.abc import Mapping
from typing import Any, Union

import yaml
from pydantic import BaseModel, create_model

from twofold.config.schema import Config, Methods

_COMMENT_COLUMN = 44
_Lines = list[tuple[str, str]]


def dump(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The whole configuration as YAML, every default written out; `load` reads the same configuration back.

    origins: where each value was given, by dotted path (of `load_with_origins`); each line then ends with it.
    """
    lines: _Lines = []
    _write(config.model_dump(mode="json"), "", 0, origins or {}, lines)
    shown = [f"{line:<{_COMMENT_COLUMN}}  # {origin}" if origin and origins else line for line, origin in lines]
    return "\n".join([*shown, ""])


def dump_groups(**groups: BaseModel) -> str:
    """Some groups of a configuration as YAML: what a run that was set up in Python has of one."""
    lines: _Lines = []
    _write({"version": 1} | {name: group.model_dump(mode="json") for name, group in groups.items()}, "", 0, {}, lines)
    return "\n".join([*(line for line, _ in lines), ""])


def _write(values: Mapping[str, Any], prefix: str, depth: int, origins: Mapping[str, str], lines: _Lines) -> None:
    """Appends (line, origin) of every key to `lines`; a line that only opens a group has the origin ""."""
    for name, value in values.items():
        key, indent = prefix + name, "  " * depth
        if isinstance(value, dict) and value:
            lines.append((f"{indent}{name}:", ""))
            _write(value, f"{key}.", depth + 1, origins, lines)
        else:
            origin = origins.get(key)
            if origin is None and name == "kind":  # given by the shorthand `method: sft`
                origin = origins.get(prefix.rstrip("."))
            lines.append((f"{indent}{name}: {_scalar(value)}", origin or "default"))


def _scalar(value: Any) -> str:
    """A value on one line of YAML, whatever is in it."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(
        value, default_flow_style=True, default_style=style, width=10**9, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def json_schema(methods: Methods) -> dict[str, Any]:
    """The JSON schema (2020-12) of a configuration file, for editors; with the shorthand `method: sft`."""
    of_kinds: Any = Union[tuple(methods.values())] if methods else BaseModel  # noqa: UP007 (made at run time)
    whole: Any = create_model("Config", __base__=Config, method=(of_kinds, Config.model_fields["method"]))
    schema = whole.model_json_schema()
    for one in (schema, *schema.get("$defs", {}).values()):
        for name, field in one.get("properties", {}).items():
            one["properties"][name] = _with_shorthand(field, schema.get("$defs", {}))
    schema["required"] = ["version", *(name for name in schema["required"] if name != "version")]
    schema["title"] = "Twofold configuration"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _with_shorthand(field: dict[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    """Allows the name of a kind in place of its group."""
    arms = field.get("anyOf") or [field]
    kinds = [groups.get(arm.get("$ref", "").rpartition("/")[2], {}) for arm in arms]
    names = [group["properties"]["kind"]["const"] for group in kinds if "kind" in group.get("properties", {})]
    if not names:
        return field
    rest = {key: value for key, value in field.items() if key not in ("anyOf", "$ref")}
    bare = arms if field.get("anyOf") else [{"$ref": field["$ref"]}]
    return {"anyOf": [{"enum": names}, *bare], **rest}
