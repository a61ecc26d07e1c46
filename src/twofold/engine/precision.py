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


@dataclass(frozen=True)
class Precision:
    """name: 32 | bf16-mixed (fp32 parameters, bf16 forward passes) | bf16-true (everything bf16)."""

    name: str

    @classmethod
    def parse(cls, precision: int | str) -> Precision:
        name = NAMES.get(str(precision))
        if name is None:
            raise UserError(f"unknown precision '{precision}'. {nearest(str(precision), NAMES)}")
        if name == "16-mixed":
            raise UserError(
                "precision 16 needs a loss scaler, which is not in this version yet: use 32 or 'bf16-mixed'."
            )
        return cls(name)

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.name == "bf16-true" else torch.float32

    def autocast(self, device_type: str) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context of a forward pass."""
        if self.name == "bf16-mixed":
            return lambda: torch.autocast(device_type, dtype=torch.bfloat16)
        return nullcontext
