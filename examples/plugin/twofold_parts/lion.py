"""An optimizer: Lion (arXiv 2302.06675, algorithm 2). `train: {optimizer: lion, lr: 1e-4}`.

An optimizer is any subclass of torch.optim.Optimizer. This one works number by number, so it runs on whatever a rank
holds: whole parameters, ZeRO's parts, DTensors.
"""

import torch


class Lion(torch.optim.Optimizer):
    """betas: weights of the update's direction, and of the momentum."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"], *group["betas"], group["weight_decay"])
        return loss

    def _update(self, p, lr, beta1, beta2, weight_decay):
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        momentum = state["momentum"]
        direction = momentum.lerp(p.grad, 1 - beta1).sign_()
        p.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)
        momentum.lerp_(p.grad, 1 - beta2)
