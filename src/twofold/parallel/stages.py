"""A model cut into the stages of a pipeline.

The model says in which order its parts run, and every part keeps its name:

    pipeline_plan = ["embed", "blocks", "head"]       # an attribute of a module of one's own

Members of a ModuleList or Sequential are parts of their own; a tuple of names is one part. The first part takes the
model's inputs, in order; each other one takes what the part before returns (one tensor). A model whose forward does
more than that has two methods beside its plan (`models/causal_lm.py` has):

    def run_stage(self, activation, **inputs)      # its forward, where foreign parts return what they are given
    def stage_activation(self, **inputs)           # a meta tensor: what passes from a stage to the next

Stages share the parts with the model: a stage is a copy of the model's structure with stand-ins for foreign parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofold.errors import UserError

Unit = tuple[str, ...]
"""Names of submodules that stay together on one stage."""


class Skip(nn.Module):
    """In the place of a part that is on another stage: returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


def units(model: Any) -> list[Unit]:
    """The parts of a model in the order in which they run. Raises UserError if it has no plan, or the plan leaves
    parameters out."""
    plan = getattr(model, "pipeline_plan", None)
    name = type(model).__name__
    if not plan:
        raise UserError(
            f"strategy 'pp': {name} declares no pipeline_plan. Give it one that names its parts in the order in which "
            "they run, as in pipeline_plan = ['embed', 'blocks', 'head'], or use ddp or fsdp."
        )
    found: list[Unit] = []
    for entry in plan:
        names = (entry,) if isinstance(entry, str) else tuple(entry)
        modules = [_submodule(model, n) for n in names]
        if isinstance(entry, str) and isinstance(modules[0], nn.ModuleList | nn.Sequential):
            found += [(f"{entry}.{n}",) for n, _ in modules[0].named_children()]
        else:
            found.append(names)
    covered = {id(p) for unit in found for n in unit for p in model.get_submodule(n).parameters()}
    left = [n for n, p in model.named_parameters() if id(p) not in covered]
    if left:
        raise UserError(f"strategy 'pp': the pipeline_plan of {name} leaves out {', '.join(left[:3])}: name all.")
    return found


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise UserError(f"pipeline_plan: '{name}' is no submodule of {type(model).__name__}.") from None


def assign(model: nn.Module, parts: Sequence[Unit], stages: int) -> list[list[Unit]]:
    """The parts of each stage: neighbours, with a sum of squared costs as small as can be. A part costs its
    parameters, embeddings nothing. Raises UserError for more stages than parts."""
    if len(parts) < stages:
        raise UserError(
            f"strategy 'pp': {type(model).__name__} has {len(parts)} parts in a row, too few for {stages} stages: give "
            "pp fewer ranks, or use a schedule with one stage on each (gpipe, 1f1b)."
        )
    sums = [0.0]
    for unit in parts:
        sums.append(sums[-1] + sum(_cost(model.get_submodule(name)) for name in unit))
    # least[k][i]: (cost, start of the last stage) of the first i parts on k stages
    least: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * len(parts)]
    for k in range(1, stages + 1):
        row = [(float("inf"), 0)]
        for i in range(1, len(parts) + 1):
            row.append(min((least[k - 1][j][0] + (sums[i] - sums[j]) ** 2, j) for j in range(i)))
        least.append(row)
    ends, i = [], len(parts)
    for k in range(stages, 0, -1):
        start = least[k][i][1]
        ends.append(list(parts[start:i]))
        i = start
    return ends[::-1]


def _cost(part: nn.Module) -> int:
    return sum(
        p.numel() for m in part.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)
    )


@dataclass
class Twin:
    """A parameter that several stages use (tied embeddings). names: its name on each of them, by stage; they are
    parameters of their own, alike because their gradients are summed."""

    names: dict[int, list[str]]


def twins(model: nn.Module, plan: Sequence[Sequence[Unit]]) -> list[Twin]:
    """The trained parameters that occur on more than one stage."""
    stage_of = {name: i for i, parts in enumerate(plan) for unit in parts for name in unit}
    found: dict[int, Twin] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.requires_grad:
            stage = next(s for part, s in stage_of.items() if name.startswith(f"{part}."))
            found.setdefault(id(p), Twin({})).names.setdefault(stage, []).append(name)
    return [twin for twin in found.values() if len(twin.names) > 1]


def untie(model: nn.Module, found: Sequence[Twin]) -> None:
    """Gives every stage but the first a parameter of its own."""
    for twin in found:
        for stage in sorted(twin.names)[1:]:
            p = model.get_parameter(twin.names[stage][0])
            own = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            for name in twin.names[stage]:
                path, _, last = name.rpartition(".")
                model.get_submodule(path)._parameters[last] = own


def structure(model: nn.Module, parts: Sequence[Unit], plan: Sequence[Sequence[Unit]]) -> nn.Module:
    """A copy of the model that shares these parts with it and has stand-ins for all others."""
    memo: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    kept = {name for unit in parts for name in unit}
    for stage in plan:
        for name in (name for unit in stage for name in unit):
            part = model.get_submodule(name)
            memo[id(part)] = part if name in kept else stand_in(model, name)
    return deepcopy(model, memo)


def stand_in(model: Any, name: str) -> nn.Module:
    """What takes the place of a part that is on another stage: the model may have something of its own for it."""
    made = model.stand_in(name) if hasattr(model, "stand_in") else None
    return Skip() if made is None else made


def prune(model: nn.Module, plan: Sequence[Sequence[Unit]], mine: Sequence[int]) -> None:
    """Replaces the parts of all stages but `mine`, in place."""
    for name in (name for i, stage in enumerate(plan) if i not in mine for unit in stage for name in unit):
        model.set_submodule(name, stand_in(model, name))


class Chain:
    """Runs a module of one's own part by part, and foretells the shape of what passes between its stages."""

    def __init__(self, model: nn.Module, plan: Sequence[Sequence[Unit]]) -> None:
        memo: dict[int, Any] = {
            id(x): torch.empty_like(x, device="meta") for x in (*model.parameters(), *model.buffers())
        }
        memo = {key: nn.Parameter(x) if x.is_floating_point() else x for key, x in memo.items()}
        self.shape, self.plan = deepcopy(model, memo), plan
        self.known: dict[Any, Tensor] = {}

    def run(self, model: nn.Module, stage: int, activation: Tensor | None, inputs: dict[str, Any]) -> Any:
        x = activation
        for name in (name for unit in self.plan[stage] for name in unit):
            part = model.get_submodule(name)
            x = part(*inputs.values()) if x is None else part(x)
        return x

    @torch.no_grad()
    def activation(self, stage: int, inputs: dict[str, Any]) -> Tensor:
        """A meta tensor like what stage `stage` receives."""
        shapes = tuple((n, x.shape, x.dtype) if isinstance(x, Tensor) else (n, x) for n, x in inputs.items())
        if (stage, shapes) not in self.known:
            x = None
            meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in inputs.items()}
            for before in range(stage):
                x = self.run(self.shape, before, x, meta)
            if not isinstance(x, Tensor):
                raise UserError(f"pipeline_plan: a part must return one tensor, not {type(x).__name__}.")
            self.known[stage, shapes] = x
        return self.known[stage, shapes]
