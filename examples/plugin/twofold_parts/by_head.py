"""An exchange of the context axis: keys and values are gathered for a few heads at a time.
`run: {strategy: "cp:2,by-head"}`. As all-gather, but keys and values of one head group only are whole at a time.

An exchange is a function of this rank's queries, keys and values: [1, heads, tokens of this rank, head size].
"""

import torch

from twofold.ops.attention import packed_attention


def attend(context, q, k, v, lengths, options):
    """Returns [1, tokens of this rank, heads, head size]."""
    start, made = context.rank * q.shape[2], []
    share = q.shape[1] // k.shape[1]
    for i in range(k.shape[1]):
        keys, values = (context.gather(x[:, i : i + 1], 2) for x in (k, v))
        made.append(packed_attention(q[:, i * share : (i + 1) * share], keys, values, lengths, start=start, **options))
    return torch.cat(made, dim=2)
