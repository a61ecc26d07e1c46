"""A communication hook: gradients travel as 8-bit numbers. `run: {strategy: ddp, comm_hook: int8}`.

A hook that remembers something is a class: made once with the process group, called with each bucket of gradients. It
returns a future of their mean over the ranks. (One that remembers nothing can be a function `(group, bucket)`.)
"""

import torch
import torch.distributed as dist


class Int8:
    """Each rank sends round(g / scale) of one scale a bucket, and adds what rounding lost to its next gradients (error
    feedback, arXiv 1901.09847)."""

    def __init__(self, group):
        self.group, self.lost = group, {}

    def __call__(self, bucket):
        gradients, ranks = bucket.buffer(), dist.get_world_size(self.group)
        key = tuple(map(id, bucket.parameters()))  # after its first step DDP makes other buckets
        gradients += self.lost.pop(key, 0)
        scale = gradients.abs().max().clamp(min=1e-30) / 127
        small = (gradients / scale).round().to(torch.int8)
        self.lost[key] = gradients - small * scale
        smalls = [torch.empty_like(small) for _ in range(ranks)]
        scales = [torch.empty_like(scale) for _ in range(ranks)]
        first = dist.all_gather(scales, scale, group=self.group, async_op=True)
        second = dist.all_gather(smalls, small, group=self.group, async_op=True)

        def mean(_):
            first.wait()
            return gradients.copy_(sum(s * q for s, q in zip(scales, smalls, strict=True)) / ranks)

        return second.get_future().then(mean)
