"""The tensor axis: every rank holds a slice of each weight matrix and works on the same samples (arXiv 1909.08053).

What is split and how is the model's to say, in one of two ways:

    tensor_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}     # an attribute of a module of one's own
    def split_tensor(self, devices: DeviceMesh, sequence: bool) -> None      # a method that does it (CausalLM)

colwise: a linear layer's output features, left split; colwise_gather: gathered again; rowwise: its input features,
which come split from a colwise layer; embedding: the rows of an embedding. PyTorch's `parallelize_module` does the
work, and a value may be any of its `ParallelStyle`s.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from twofold.errors import UserError, nearest
from twofold.mesh.mesh import Mesh

STYLES = {
    "colwise": lambda: ColwiseParallel(),
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": lambda: RowwiseParallel(),
    "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def split(model: Any, mesh: Mesh, sequence: bool = False) -> None:
    """Splits the model over the tensor axis, in place. sequence: between split layers each rank has a piece of the
    tokens. Raises UserError if it has no plan."""
    devices = mesh.sub("tensor")
    if hasattr(model, "split_tensor"):
        model.split_tensor(devices, sequence)
        return
    if sequence:
        raise UserError(
            f"strategy 'sequence' is for language models: in the tensor_plan of {type(model).__name__}, use torch's "
            "SequenceParallel and its kin as values."
        )
    plan = getattr(model, "tensor_plan", None)
    if not plan:
        raise UserError(
            f"strategy 'tp': {type(model).__name__} declares no tensor_plan. Give it one, as in "
            "tensor_plan = {'up': 'colwise', 'down': 'rowwise'}, or use ddp or fsdp."
        )
    _check_names(model, plan)
    parallelize_module(model, devices, {name: _style(name, how) for name, how in plan.items()})


def _style(name: str, how: str | ParallelStyle) -> ParallelStyle:
    if isinstance(how, ParallelStyle):
        return how
    if how not in STYLES:
        raise UserError(f"tensor_plan['{name}']: unknown style '{how}'. {nearest(how, STYLES)}")
    return STYLES[how]()


def _check_names(model: nn.Module, plan: dict[str, Any]) -> None:
    """A rule that fits no module would be skipped in silence."""
    from fnmatch import fnmatchcase

    names = [name for name, _ in model.named_modules() if name]
    for rule in plan:
        depth = rule.count(".")
        if not any(name.count(".") == depth and fnmatchcase(name, rule) for name in names):
            raise UserError(f"tensor_plan: '{rule}' is no module of {type(model).__name__}. {nearest(rule, names)}")
