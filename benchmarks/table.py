"""Makes the tables of README.md from results.json: `python benchmarks/table.py`.

What stands between the two markers is replaced; the rest of the page is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results: made by table.py, do not edit -->", "<!-- end of results -->"


def write(results: Path, page: Path) -> None:
    """Replaces the tables of `page`. Raises ValueError if its markers are missing."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} lacks the markers {BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    rows = json.loads(results.read_text(encoding="utf-8"))
    page.write_text(before + BEGIN + "\n\n" + tables(rows) + "\n" + END + after, encoding="utf-8")


def tables(rows: list[dict[str, Any]]) -> str:
    """Two tables, the ratios and what each side did, and on what machine."""
    out = _head("benchmark", "ours", "peer", "unit", "ours / peer", "rounds", "goal", "holds")
    out += [_ratio(row) for row in rows]
    out += ["", "Steps, tokens and losses of the median round (ours → peer's):", ""]
    out += _head("benchmark", "sides", "steps", "tokens", "targets", "first loss", "last loss")
    out += [_work(row) for row in rows if "MB" not in row["unit"]]
    out += ["", *sorted({_origin(row) for row in rows})]
    return "\n".join(out) + "\n"


def line(row: dict[str, Any]) -> str:
    """One row for a terminal."""
    goal = f", goal {row['goal']}: {'holds' if row['holds'] else 'MISSED'}" if row["goal"] else ""
    return f"{row['name']}: {row['ours']} against {row['peer']} {row['unit']}, ratio {row['ratio']:.2f}{goal}"


def _ratio(row: dict[str, Any]) -> str:
    ratios = row["detail"]["ratios"]
    spread = f"{len(ratios)}: {min(ratios):.2f} to {max(ratios):.2f}"
    verdict = "" if row["holds"] is None else "yes" if row["holds"] else "**no**"
    cells = [row["name"], _number(row["ours"]), _number(row["peer"]), row["unit"], f"**{row['ratio']:.2f}**", spread]
    return _cells([*cells, row["goal"] or "", verdict])


def _work(row: dict[str, Any]) -> str:
    ours, peer = row["detail"]["ours"], row["detail"]["peer"]
    keys = ("steps", "tokens", "targets", "first_loss", "final_loss")
    return _cells([row["name"], " → ".join(row["detail"]["sides"]), *(_both(ours, peer, key) for key in keys)])


def _both(ours: dict[str, Any], peer: dict[str, Any], key: str) -> str:
    values = [_number(side[key]) for side in (ours, peer) if key in side]
    return values[0] if len(set(values)) == 1 else " → ".join(values)


def _origin(row: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    return f"- {row['date']}, {row['machine']}: {versions}"


def _head(*names: str) -> list[str]:
    return [_cells(list(names)), _cells(["---"] * len(names))]


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    write(here / "results.json", here / "README.md")
