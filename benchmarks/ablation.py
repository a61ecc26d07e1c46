"""What makes fine-tuning quick, each change alone: a plain PyTorch loop with switches, no code of Twofold's.

`python benchmarks/ablation.py SIDE [half|all]`. The model, rows and steps are those of `sft.py`. Sides:
  padded      rows padded to the longest of the step, logits of every position, AdamW as torch has it by default;
  labels      the same, but the output head sees only the positions that predict a label;
  unpadded    rows joined without padding, attention row by row, logits of every position;
  both        labels and unpadded;
  both_fused  the same with fused AdamW;
  padded_fused  padded with fused AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rows as data
from measure import Meter, main, report
from sft import LR, llama


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, cuts: Sequence[int], **_: Any
) -> tuple[Any, None]:
    """Causal attention of each row to itself. query: [1, heads, tokens, head_dim]; cuts: tokens of each row."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    out = []
    for q, k, v in zip(*(x.split(cuts, dim=2) for x in (query, key, value)), strict=True):
        out.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


def joined(batch: list[data.Row]) -> tuple[dict[str, Any], Any]:
    """(inputs of the model, next-token labels [1, tokens]) without padding."""
    import torch

    cuts = [len(row["input_ids"]) for row in batch]
    ids = torch.tensor([[token for row in batch for token in row["input_ids"]]])
    positions = torch.cat([torch.arange(n) for n in cuts])[None]
    following = torch.tensor([[label for row in batch for label in [*row["labels"][1:], -100]]])
    return {"input_ids": ids, "position_ids": positions, "cuts": cuts}, following


def padded(batch: list[data.Row]) -> tuple[dict[str, Any], Any]:
    """The same with one row of the tensor per row of data: [rows, longest]."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in batch], batch_first=True)
    mask = pad_sequence([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in batch], batch_first=True)
    following = [torch.tensor([*row["labels"][1:], -100]) for row in batch]
    labels = pad_sequence(following, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": mask}, labels


def summed_loss(model: Any, inputs: dict[str, Any], labels: Any, only_labels: bool) -> Any:
    """The negative log-likelihood of all labels, summed."""
    from torch.nn.functional import cross_entropy

    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    if only_labels:
        where = labels != -100
        return cross_entropy(model.lm_head(hidden[where]), labels[where], reduction="sum")
    logits = model.lm_head(hidden).flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def prepared(unpadded: bool) -> Any:
    """The model, with attention row by row if it is to run without padding."""
    from transformers import AttentionInterface

    model = llama().train()
    if unpadded:
        AttentionInterface.register("row_by_row", attention)
        model.set_attn_implementation("row_by_row")
    return model


def loop(kind: str, only_labels: bool = False, unpadded: bool = False, fused: bool = False) -> None:
    import torch

    model = prepared(unpadded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR["llama"], weight_decay=0.0, fused=fused or None)
    batches = data.batches(data.synthetic(all_labels=kind == "all"))
    meter = Meter()
    meter.reset_memory()
    for step, batch in enumerate(batches, start=1):
        inputs, labels = (joined if unpadded else padded)(batch)
        loss = summed_loss(model, inputs, labels, only_labels) / data.targets(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.losses.append(loss.item())
        meter.step_done(step, len(batches))
    done = [data.tokens(batch) for batch in batches]
    report(meter, steps=len(batches) - 1, tokens=sum(done[1:]))


SIDES = {
    "padded": lambda kind="half": loop(kind),
    "labels": lambda kind="half": loop(kind, only_labels=True),
    "unpadded": lambda kind="half": loop(kind, unpadded=True),
    "both": lambda kind="half": loop(kind, only_labels=True, unpadded=True),
    "both_fused": lambda kind="half": loop(kind, only_labels=True, unpadded=True, fused=True),
    "padded_fused": lambda kind="half": loop(kind, fused=True),
}

if __name__ == "__main__":
    main(SIDES)
