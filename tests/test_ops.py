"""Per-sample attention and chunked log-probabilities against plain PyTorch, values and gradients."""

import pytest
import torch
from torch.nn import functional as F

from twofold.ops import attention, logps
from twofold.ops.attention import packed_attention
from twofold.ops.blocks import block, block_gradients, merge

LENGTHS = (5, 1, 9, 3)


def inputs(heads: int = 4, kv_heads: int = 2, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), width), *[(1, kv_heads, sum(LENGTHS), width)] * 2]
    return [torch.randn(s, generator=generator, dtype=torch.double, requires_grad=True) for s in shapes]


def by_the_book(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, softcap: float | None
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(d) + mask) v over all tokens at once, with the mask that keeps samples apart."""
    sample = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    position = torch.arange(sum(LENGTHS))
    allowed = sample[:, None] == sample[None]
    if causal:
        allowed &= position[:, None] >= position[None]
    if window is not None:
        allowed &= position[:, None] - position[None] < window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits.masked_fill(~allowed, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    ("causal", "window", "softcap"),
    [(True, None, None), (True, 3, None), (False, None, None), (True, None, 2.0), (True, 4, 2.0), (False, None, 2.0)],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_attention(causal: bool, window: int | None, softcap: float | None, kv_heads: int) -> None:
    tensors = inputs(kv_heads=kv_heads)
    found = packed_attention(*tensors, LENGTHS, causal=causal, window=window, softcap=softcap)
    expected = by_the_book(*tensors, causal, window, softcap)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((found * weights).sum(), tensors),
        torch.autograd.grad((expected * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 2.0), (3, 2.0)])
def test_attention_in_trees(window: int | None, softcap: float | None, kv_heads: int) -> None:
    """Outputs and gradients are those of each branch after its own copy of the trunk."""
    torch.manual_seed(0)
    lengths = (4, (5, 3, 6), (1, 1, 2, 3))
    q, k, v = (torch.randn(1, h, 25, 8, dtype=torch.float64).requires_grad_() for h in (4, kv_heads, kv_heads))
    weight = torch.randn(1, 25, 4, 8, dtype=torch.float64)
    out = packed_attention(q, k, v, lengths, window=window, softcap=softcap)
    found = torch.autograd.grad((out * weight).sum(), (q, k, v))
    total, begun = torch.zeros((), dtype=torch.float64), 0
    for length in lengths:
        trunk, *branches = (length,) if isinstance(length, int) else length
        after = begun + trunk
        for i, branch in enumerate(branches or [0]):
            at = [*range(begun, begun + trunk), *range(after, after + branch)]
            alone = packed_attention(*(x[:, :, at] for x in (q, k, v)), (len(at),), window=window, softcap=softcap)
            torch.testing.assert_close(alone, out[:, at])
            kept = slice(0 if i == 0 else trunk, None)  # the trunk counts once
            total = total + (alone * weight[:, at])[:, kept].sum()
            after += branch
        begun = after
    for one, other in zip(found, torch.autograd.grad(total, (q, k, v)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("causal", "window", "softcap"), [(True, None, None), (True, 3, None), (False, None, None), (True, 4, 2.0)]
)
@pytest.mark.parametrize("pieces", [2, 3, 9])
def test_attention_of_a_piece_of_the_row(causal: bool, window: int | None, softcap: float | None, pieces: int) -> None:
    """The queries in pieces, whose borders lie inside of samples, give what they give together."""
    q, k, v = inputs()
    size = q.shape[2] // pieces
    options = {"causal": causal, "window": window, "softcap": softcap}
    parts = [packed_attention(x, k, v, LENGTHS, start=i * size, **options) for i, x in enumerate(q.split(size, 2))]
    expected = by_the_book(q, k, v, causal, window, softcap)
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    weights = torch.randn_like(expected)
    found = torch.autograd.grad((torch.cat(parts, 1) * weights).sum(), (q, k, v))
    torch.testing.assert_close(found, torch.autograd.grad((expected * weights).sum(), (q, k, v)))


@pytest.mark.parametrize(("causal", "window", "softcap"), [(True, None, None), (True, 3, 2.0), (False, None, None)])
def test_attention_in_blocks(causal: bool, window: int | None, softcap: float | None) -> None:
    """Keys in two blocks, merged; and each block's gradients."""
    q, k, v = inputs()
    n, scale = q.shape[2], q.shape[-1] ** -0.5
    blocks = [slice(n // 2, n), slice(0, n // 2)]
    expected = by_the_book(q, k, v, causal, window, softcap).transpose(1, 2)
    weights = torch.randn_like(expected)
    d_q = torch.autograd.grad((expected * weights).sum(), q, retain_graph=True)[0]
    rows = slice(n // 2, n)  # each of these has a key in the first block
    masks = [attention.allowed_pairs(LENGTHS, rows, columns, causal, window, q.device) for columns in blocks]
    mine = q[:, :, rows]
    found = [block(mine, k[:, :, c], v[:, :, c], mask, scale, softcap) for c, mask in zip(blocks, masks, strict=True)]
    out, lse = merge(*found[0], *found[1])
    torch.testing.assert_close(out, expected[:, :, rows])
    up = weights[:, :, rows]
    delta = (out * up).sum(-1)
    gradients = [
        block_gradients(mine, k[:, :, c], v[:, :, c], mask, scale, softcap, lse, up, delta)
        for c, mask in zip(blocks, masks, strict=True)
    ]
    torch.testing.assert_close(gradients[0][0] + gradients[1][0], d_q[:, :, rows])
    alone = torch.autograd.grad((expected * weights)[:, :, rows].sum(), (k, v))
    for i, c in enumerate(blocks):
        torch.testing.assert_close(gradients[i][1], alone[0][:, :, c])
        torch.testing.assert_close(gradients[i][2], alone[1][:, :, c])


def test_the_variable_length_kernel_is_called_with_its_own_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA path, with a kernel by the book in place of torch's (same signature, no GPU needed)."""
    from torch.nn.attention import varlen

    def kernel(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size, enable_gqa):  # type: ignore[no-untyped-def]
        assert ends_q.dtype == torch.int32
        assert ends_q.tolist() == ends_k.tolist() == [0, 5, 6, 15, 18]
        assert longest_q == longest_k == 9
        assert q.shape == (18, 4, 8)
        assert k.shape == (18, 2, 8)
        assert enable_gqa
        assert window_size == (3, 0)  # three tokens back and the token itself: a window of 4
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return by_the_book(q, k, v, causal=True, window=window_size[0] + 1, softcap=None)[0]

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    q, k, v = inputs()
    found = attention._varlen(q, k, v, LENGTHS, None, True, 4)
    torch.testing.assert_close(found, by_the_book(q, k, v, True, 4, None))


@pytest.mark.parametrize("keep", [0, 1 << 30])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_linear_logps(keep: int, with_bias: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 of 70 positions; probabilities kept or computed again; arbitrary upstream gradients."""
    monkeypatch.setattr(logps, "KEEP_BYTES", keep)
    monkeypatch.setattr(logps, "CHUNK_BYTES", 1)
    generator = torch.Generator().manual_seed(0)
    new = {"generator": generator, "dtype": torch.double}
    hidden = torch.randn(70, 12, **new).requires_grad_()
    weight = torch.randn(53, 12, **new).requires_grad_(not frozen)
    bias = torch.randn(53, **new).requires_grad_(not frozen) if with_bias else None
    targets = torch.randint(53, (70,), generator=generator)
    up = torch.randn(2, 70, **new)
    leaves = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    logp, mean = logps.linear_logps(hidden, targets, weight, bias, with_mean=True)
    everything = F.log_softmax(F.linear(hidden, weight, bias), -1)
    expected = everything.gather(1, targets[:, None])[:, 0], everything.mean(-1)
    torch.testing.assert_close((logp, mean), expected)
    for a, b in zip(
        torch.autograd.grad((logp * up[0] + mean * up[1]).sum(), leaves),
        torch.autograd.grad((expected[0] * up[0] + expected[1] * up[1]).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_any_other_head_gives_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 12, generator=generator, dtype=torch.double, requires_grad=True)
    weight = torch.randn(53, 12, generator=generator, dtype=torch.double, requires_grad=True)
    targets = torch.randint(53, (300,), generator=generator)

    def head(h: torch.Tensor) -> torch.Tensor:
        return 3 * torch.tanh(h @ weight.T / 3)

    logp, mean = logps.chunked_logps(hidden.float(), targets, lambda h: head(h.double()), with_mean=True)
    everything = F.log_softmax(head(hidden.float().double()), -1)
    torch.testing.assert_close(logp.double(), everything.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mean.double(), everything.mean(-1), rtol=1e-5, atol=1e-5)


def test_autocast_computes_the_head_in_bf16_and_sums_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 16, generator=generator, requires_grad=True)
    weight = (0.3 * torch.randn(31, 16, generator=generator)).requires_grad_()
    targets = torch.randint(31, (20,), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, _ = logps.linear_logps(hidden, targets, weight)
    assert logp.dtype == torch.float32
    expected = F.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logp, expected, rtol=0.05, atol=0.05)
    found, exact = (torch.autograd.grad(x.sum(), [hidden, weight]) for x in (logp, expected))
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
