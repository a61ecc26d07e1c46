"""What training will see: rows as samples, with the trained tokens marked, and what the data holds.

The marks come from the labels of the very samples that are trained on, so what is shown is what gets gradient.
"""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Any

from twofold.config.schema import DataOptions
from twofold.data.encode import IGNORE
from twofold.data.prepare import samples
from twofold.data.tokens import DataReport, TokenDataset
from twofold.errors import UserError

OPEN, CLOSE = "⟦", "⟧"


def preview(source: Any, tokenizer: Any, options: DataOptions, rows: int = 3, kind: str = "single") -> None:
    """Prints the first samples and the report. Rows that cannot be trained are listed, not refused.

    Raises UserError, after the list, where not one row can be trained.
    """
    data = samples(source, tokenizer, options, kind=kind)
    for i in range(min(rows, len(data))):
        _print_sample(data, tokenizer, i)
    print("\n".join(describe(data.report)))
    if not len(data):
        raise UserError(f"data.train: {data.report.source}: not one row can be trained. The reasons stand above.")
    if data.report.bad and options.on_bad_row == "refuse":
        print("training will refuse these rows: mend them, or leave them out with data.on_bad_row=skip")


def segments(sample: dict[str, Any], tokenizer: Any) -> list[tuple[str, bool]]:
    """A sample as text: (piece, whether it is trained). The first token is never a target."""
    ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    trained = [i > 0 and label != IGNORE for i, label in enumerate(labels)]
    runs = groupby(range(len(ids)), key=trained.__getitem__)
    return [(tokenizer.decode([ids[i] for i in run]), is_trained) for is_trained, run in runs]


def _print_sample(data: TokenDataset, tokenizer: Any, i: int) -> None:
    sequences, values = data.sequences(i), data[i].get("values")
    for number, sequence in enumerate(sequences):
        trained = int((sequence["labels"][1:] != IGNORE).sum())
        head = data.report.place(data.row_numbers[i])
        head += f" · {number + 1} of {len(sequences)}" if len(sequences) > 1 else ""
        head += f" · value {_short(values[number])}" if values is not None else ""
        _print_sequence(f"{head} · {len(sequence['labels'])} tokens · {trained} trained", segments(sequence, tokenizer))


def _short(value: Any) -> str:
    return str(value) if isinstance(value, str) else f"{value:g}"


def _print_sequence(head: str, pieces: list[tuple[str, bool]]) -> None:
    if not sys.stdout.isatty():
        text = "".join(f"{OPEN}{piece}{CLOSE}" if is_trained else piece for piece, is_trained in pieces)
        print(f"--- {head} (trained: {OPEN}…{CLOSE})\n{text}\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.rule(f"{head} (trained: green)", align="left", style="dim")
    console.print(Text.assemble(*((piece, "bold green" if is_trained else "dim") for piece, is_trained in pieces)))


def describe(report: DataReport) -> list[str]:
    """The report in lines."""
    share = 100 * report.trained / max(1, report.tokens)
    least, median, most95, most = report.lengths or [0, 0, 0, 0]
    lines = [
        f"source   {report.source} · format: {report.stated_format()}",
        f"rows     {report.rows:,} · {report.samples:,} samples · {len(report.bad):,} cannot be trained",
        f"tokens   {report.tokens:,} · {report.trained:,} trained ({share:.1f} %)",
        f"lengths  {least} to {most} tokens · median {median} · 95 % have at most {most95}",
    ]
    lines += [f"unused   columns {', '.join(report.unused)}"] if report.unused else []
    lines += [f"note     {note}" for note in report.notes]
    lines += [f"bad      {report.place(row)}: {reason}" for row, reason in report.bad[:20]]
    if len(report.bad) > 20:
        lines.append(f"bad      … and {len(report.bad) - 20} more")
    return lines
