"""An optimizer that asks for parameter groups of its own: Muon for the matrices of linear layers (Jordan et al. 2024,
kellerjordan.github.io/posts/muon), AdamW for all else. `train: {optimizer: muon, lr: 1e-3}`.

One learning rate serves both (arXiv 2502.16982, equation 4). Muon looks at whole matrices: of one that lies in parts
on the shard and tensor axes it gathers the update, and each rank takes its part of the result.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


class Muon(torch.optim.AdamW):
    """momentum: of Muon; betas, eps: of AdamW; weight_decay of both."""

    def __init__(self, params, lr=1e-3, momentum=0.95, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0):
        super().__init__(params, lr, betas, eps, weight_decay)
        for group in self.param_groups:
            group.setdefault("muon", False)
            group.setdefault("momentum", momentum)

    @staticmethod
    def parameter_groups(model, weight_decay):
        """Weights of linear layers are Muon's; embeddings, the output head and vectors AdamW's."""
        others = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        for module in model.modules():
            head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
            others |= {id(p) for p in head.parameters()} if head is not None else set()
        groups = {}
        for p in model.parameters():
            if p.requires_grad:
                key = p.ndim == 2 and id(p) not in others, weight_decay if p.ndim >= 2 else 0.0
                groups.setdefault(key, []).append(p)
        return [{"params": g, "muon": muon, "weight_decay": decay} for (muon, decay), g in groups.items()]

    @torch.no_grad()
    def step(self, closure=None):
        every, self.param_groups = self.param_groups, [g for g in self.param_groups if not g["muon"]]
        loss = super().step(closure)
        self.param_groups = every
        for group in every:
            for p in group["params"] if group["muon"] else ():
                if p.grad is not None:
                    self._update(p, group["lr"], group["momentum"], group["weight_decay"])
        return loss

    def _update(self, p, lr, momentum, weight_decay):
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())  # not counted; AdamW asks every state for it when it loads
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(p.grad, 1 - momentum)
        update = _on_whole_matrix(orthogonal, p.grad.lerp(state["momentum"], momentum))
        p.mul_(1 - lr * weight_decay).sub_(update, alpha=0.2 * max(p.shape) ** 0.5 * lr)


def orthogonal(x):
    """The nearest matrix with orthonormal rows or columns, nearly: five Newton-Schulz steps. In fp32: with bf16, as the
    authors do, rounding would differ from layout to layout."""
    y = x.float().T if x.shape[0] > x.shape[1] else x.float()
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
    return (y.T if x.shape[0] > x.shape[1] else y).to(x.dtype)


def _on_whole_matrix(function, x):
    if not isinstance(x, DTensor):
        return function(x)
    whole = DTensor.from_local(function(x.full_tensor()), x.device_mesh, [Replicate()] * x.device_mesh.ndim)
    return whole.redistribute(placements=x.placements)
