"""The rows of the SFT benchmarks: seeded, tokenised once, the same labels for every side.

Rows are {"input_ids": [n], "labels": [n]}; labels are -100 on the prompt. Lengths are log-normal with Alpaca's median
(120) and spread (sigma 1.0), drawn within its 5th to 95th percentile, 20 to 400; the completion is 20 to 60 % of a
row, 40 % on average, as in `examples/tickets`. Both sides train on exactly these labels in exactly this order, so their
losses can be compared step by step. Tokenised beforehand because two template engines would not give two trainers
the same labels, and because tokenising is not what is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from measure import quick

ROWS = 96
BATCH = 8
EPOCHS = 2
VOCABULARY = 49_152
TICKETS = Path(__file__).resolve().parent.parent / "examples" / "tickets" / "train.jsonl"

Row = dict[str, list[int]]


def lengths(rng: np.random.Generator, rows: int) -> list[int]:
    """Log-normal lengths within 20 to 400 tokens."""
    drawn: list[int] = []
    while len(drawn) < rows:
        n = int(rng.lognormal(np.log(120), 1.0))
        if 20 <= n <= 400:
            drawn.append(n)
    return drawn


def labelled(ids: list[int], share: float) -> Row:
    """A row of which the last `share` is the completion."""
    prompt = min(len(ids) - 1, max(1, round(len(ids) * (1 - share))))
    return {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}


def synthetic(all_labels: bool = False, rows: int = ROWS, seed: int = 7) -> list[Row]:
    """Tokens by Zipf's law over the whole vocabulary: something to learn (frequencies), nothing to understand."""
    rng = np.random.default_rng(seed)
    out = []
    for n in lengths(rng, rows):
        ids = ((rng.zipf(1.3, n) - 1) % VOCABULARY).tolist()
        out.append(labelled(ids, 1.0 if all_labels else rng.uniform(0.2, 0.6)))
    return out


def from_tickets(tokenizer: Any, rows: int = ROWS) -> list[Row]:
    """The ticket rows as they are: about 100 tokens each, the assistant's turn and its end token labelled."""
    out = []
    for line in TICKETS.read_text(encoding="utf-8").splitlines()[:rows]:
        messages = json.loads(line)["messages"]
        prompt = _ids(tokenizer, messages[:-1], add_generation_prompt=True)
        whole = _ids(tokenizer, messages)
        assert whole[: len(prompt)] == prompt
        out.append({"input_ids": whole, "labels": [-100] * len(prompt) + whole[len(prompt) :]})
    return out


def ticket_text(tokenizer: Any, rows: int = ROWS, seed: int = 7) -> list[Row]:
    """Real tokens in the lengths of `synthetic`: consecutive pieces of the ticket conversations."""
    rng = np.random.default_rng(seed)
    stream = [token for row in from_tickets(tokenizer, 10**6) for token in row["input_ids"]]
    out, at = [], 0
    for n in lengths(rng, rows):
        out.append(labelled(stream[at : at + n], rng.uniform(0.2, 0.6)))
        at += n
    assert at <= len(stream)
    return out


def _ids(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def steps() -> int:
    """Optimizer steps of a side that takes 8 rows a step."""
    return 3 if quick() else EPOCHS * ROWS // BATCH


def batches(data: list[Row]) -> list[list[Row]]:
    """The rows of each step, in file order, epoch after epoch."""
    return [[data[(step * BATCH + i) % len(data)] for i in range(BATCH)] for step in range(steps())]


def tokens(rows: list[Row]) -> int:
    """Real tokens: what the rows hold. Padding is nobody's work."""
    return sum(len(row["input_ids"]) for row in rows)


def targets(rows: list[Row]) -> int:
    return sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)
