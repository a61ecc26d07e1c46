"""The loss scale of fp16: as large as the gradients bear (arXiv 1710.03740, section 3.2).

Gradients are taken of the loss times `scale`. Where one of them is not finite, on any rank, the step is skipped and
the scale halved; after `interval` good steps in a row it is doubled. The rule and its numbers are those of torch's
GradScaler, which itself reads a number from the device in every step and knows nothing of gradients on other ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """scale, good_steps: tensors without shape on `device`. Losses are sums over tokens here, so the scale begins lower
    than where they are means."""

    def __init__(self, device: torch.device, initial: float = 2.0**10, interval: int = 2000) -> None:
        self.scale = torch.tensor(initial, device=device)
        self.good_steps = torch.tensor(0, device=device)
        self.interval = interval

    def step(self, optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer, finite: Tensor) -> None:
        """Steps the optimizer if `finite` (a bool tensor, alike on all ranks) is true, and adjusts the scale.

        inner: the optimizer that `optimizer` wraps, or itself.
        """
        if all(group.get("fused") for group in inner.param_groups):  # the kernel looks at found_inf by itself
            inner.found_inf = (~finite).float()  # type: ignore[attr-defined]
            optimizer.step()
        elif bool(finite):
            optimizer.step()
        self._adjust(finite)

    def _adjust(self, finite: Tensor) -> None:
        good = (self.good_steps + 1) * finite
        grow = good == self.interval
        factor = torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale = self.scale * factor
        self.good_steps = good * ~grow

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.scale, self.good_steps = state["scale"], state["good_steps"]
