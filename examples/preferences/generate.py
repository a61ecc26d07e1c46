"""Writes preferences over the tickets of `examples/tickets`: the right JSON, and one with a mistake that models make.

`python examples/preferences/generate.py` rewrites `pairs-*.jsonl` (prompt, chosen, rejected) and `rated-*.jsonl`
(messages, label) beside this file, the same bytes each time (plain Python, one seed). Test rows come from the tickets'
test rows, so their customers, order numbers and phrasings are in no training row.
"""

import json
import random
from pathlib import Path
from typing import Any

SEED = 20261207
ROWS = {"train": 240, "test": 60}
ISSUES = ["damaged", "delivery", "wrong_item", "billing", "return", "account"]
URGENCIES = ["low", "normal", "high"]
HERE = Path(__file__).parent
TICKETS = HERE.parent / "tickets"


def _text(answer: dict[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":"))


def _another(rng: random.Random, options: list[str], value: str) -> str:
    return rng.choice([option for option in options if option != value])


def _mistaken(answer: dict[str, Any], rng: random.Random) -> str:
    """The answer with one mistake: a wrong class, a lost or an invented value, a missing field, or talk around it."""
    kind = rng.choice(["issue", "urgency", "lost", "invented", "missing", "talk"])
    held = [name for name in ("customer", "order", "product") if answer[name]]
    empty = [name for name in ("customer", "order", "product") if not answer[name]]
    if kind == "issue":
        return _text(answer | {"issue": _another(rng, ISSUES, answer["issue"])})
    if kind == "lost" and held:
        return _text(answer | {rng.choice(held): None})
    if kind == "invented" and empty:
        return _text(answer | {rng.choice(empty): "unknown"})
    if kind == "missing":
        gone = rng.choice(list(answer))
        return _text({name: value for name, value in answer.items() if name != gone})
    if kind == "talk":
        return f"Sure! Here is the ticket as JSON:\n{_text(answer)}\nLet me know if you need anything else."
    return _text(answer | {"urgency": _another(rng, URGENCIES, answer["urgency"])})


def files() -> dict[str, str]:
    """name -> content."""
    made = {}
    for split, count in ROWS.items():
        rng, pairs, rated = random.Random(f"{SEED} {split}"), [], []
        lines = (TICKETS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        for i, line in enumerate(rng.sample(lines, count)):
            *prompt, turn = json.loads(line)["messages"]
            chosen, rejected = turn["content"], _mistaken(json.loads(turn["content"]), rng)
            pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
            answer = {"role": "assistant", "content": rejected if i % 2 else chosen}
            rated.append({"messages": [*prompt, answer], "label": i % 2 == 0})
        for name, rows in (("pairs", pairs), ("rated", rated)):
            made[f"{name}-{split}.jsonl"] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return made


if __name__ == "__main__":
    for name, content in files().items():
        (HERE / name).write_text(content, encoding="utf-8")
