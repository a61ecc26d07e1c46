"""Precision: what parameters are kept in and what forward passes compute in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from twofold.errors import UserError, nearest

NAMES = {
    "32": "32",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
    "16": "16-mixed",
    "16-mixed": "16-mixed",
}
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class Precision:
    """name: 32 | bf16-mixed, 16-mixed (fp32 parameters, bf16 or fp16 forward passes) | bf16-true (everything bf16)."""

    name: str

    @classmethod
    def parse(cls, precision: int | str) -> Precision:
        name = NAMES.get(str(precision))
        if name is None:
            raise UserError(f"unknown precision '{precision}'. {nearest(str(precision), NAMES)}")
        return cls(name)

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.name == "bf16-true" else torch.float32

    @property
    def scales_loss(self) -> bool:
        """Whether gradients need a loss scale to be seen."""
        return self.name == "16-mixed"

    def autocast(self, device_type: str) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context of a forward pass."""
        dtype = _AUTOCAST.get(self.name)
        return nullcontext if dtype is None else lambda: torch.autocast(device_type, dtype=dtype)
