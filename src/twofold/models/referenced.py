"""A language model beside the one that it is compared with, both run in every forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from twofold.models.causal_lm import CausalLM
from twofold.parallel.context import Context


class ReferencedLM(CausalLM):
    """A `CausalLM` that also gives the log-probabilities of a reference: a second, frozen model, or (None) this one
    with its adapter switched off. The reference has no gradients and no dropout. Its names are those of the model
    alone, so checkpoints of both are alike."""

    def __init__(self, model: CausalLM, reference: CausalLM | None) -> None:
        nn.Module.__init__(self)
        self.__dict__.update({k: v for k, v in model.__dict__.items() if not k.startswith("_")})
        self.hf = model.hf
        self.reference = reference.requires_grad_(False).eval() if reference is not None else None

    def train(self, mode: bool = True) -> ReferencedLM:
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def forward(self, *args: Any, **inputs: Any) -> tuple[Tensor, Tensor | None, Tensor]:  # type: ignore[override]
        """As `CausalLM.forward`, with the reference's log-probabilities as a third: fp32 [n]."""
        with torch.no_grad():
            if self.reference is not None:
                reference = self.reference(*args, **inputs)[0]
            else:
                with _without_adapter(self.hf):
                    reference = super().forward(*args, **inputs)[0]
        return (*super().forward(*args, **inputs), reference)

    def split_tensor(self, devices: DeviceMesh, sequence: bool = False) -> None:
        super().split_tensor(devices, sequence)
        if self.reference is not None:
            self.reference.split_tensor(devices, sequence)

    def split_context(self, context: Context) -> None:
        super().split_context(context)
        if self.reference is not None:
            self.reference.split_context(context)


@contextmanager
def _without_adapter(model: nn.Module) -> Iterator[None]:
    """PEFT's layers compute what they wrap. (PEFT's own `disable_adapter` also changes requires_grad, which a model in
    parts must not see.)"""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    was_training = model.training
    model.eval()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        model.train(was_training)
