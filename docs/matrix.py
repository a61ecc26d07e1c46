"""Makes docs/matrix.md from what the matrix test has measured: `python docs/matrix.py RESULTS.jsonl`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("matrix.md")
HEAD = """# Law 1 as a matrix

Every family on every layout against plain transformers on one process: gradients of the first step, and losses and
weights over twenty SGD steps with momentum and clipping, on samples of unequal length without padding, every second
step shorter than the first. Made by `make matrix` from the test's own results; do not edit.

A cell is the largest difference of any gradient (allowed: 1e-6) and the largest relative difference of a loss over the
twenty steps (allowed: 1e-5). Gradients themselves are up to 0.1 and more. A cell in bold has failed, an empty one does
not apply (experts in a model that has none).

"""


def page(rows: list[dict]) -> str:
    families = list(dict.fromkeys(row["family"] for row in rows))
    layouts = list(dict.fromkeys(row["strategy"] for row in rows))
    cells = {(row["family"], row["strategy"]): row for row in rows}
    lines = ["| layout | " + " | ".join(families) + " |", "|---" * (len(families) + 1) + "|"]
    for layout in layouts:
        shown = [cell(cells.get((family, layout))) for family in families]
        lines.append(f"| `{layout}` | " + " | ".join(shown) + " |")
    failed = sum(not holds(row) for row in rows)
    worst = {name: max(row[name] for row in rows) for name in ("gradient", "loss", "weight")}
    summary = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    return (
        HEAD + f"{len(cells)} cells, {failed} failed; the largest differences: {summary}.\n\n" + "\n".join(lines) + "\n"
    )


def cell(row: dict | None) -> str:
    if row is None:
        return ""
    text = f"{row['gradient']:.0e} / {row['loss']:.0e}"
    return text if holds(row) else f"**{text}**"


def holds(row: dict) -> bool:
    return row["gradient"] <= 1e-6 and row["loss"] <= 1e-5 and row["weight"] <= 2e-5


def ordered(rows: list[dict]) -> list[dict]:
    """In the order of the test's own lists, whatever the order in which workers have finished."""
    sys.path.insert(0, str(PAGE.parent.parent / "tests"))
    from test_law_matrix import cases

    order = {tuple(case.values): i for i, case in enumerate(cases())}
    return sorted(rows, key=lambda row: order[row["family"], row["strategy"]])


if __name__ == "__main__":
    found = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    PAGE.write_text(page(ordered(found)))
