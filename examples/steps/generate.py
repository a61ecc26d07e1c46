"""Writes `train.jsonl` and `test.jsonl`: sums of three numbers worked out in steps, some of them wrong.

`python examples/steps/generate.py`, the same bytes each time (plain Python, one seed). A step is right if it follows
from the step before; the test's sums are in no training row.
"""

import json
import random
from pathlib import Path

ROWS = {"train": 300, "test": 60}


def rows() -> dict[str, list[dict[str, object]]]:
    """split -> rows of prompt, completions, labels."""
    rng, made, seen = random.Random(20261207), {}, set()
    for split, count in ROWS.items():
        made[split] = []
        while len(made[split]) < count:
            a, b, c = (rng.randint(2, 60) for _ in range(3))
            if (a, b, c) in seen:
                continue
            seen.add((a, b, c))
            labels = [rng.random() < 0.6 for _ in range(2)]
            first = a + b + (0 if labels[0] else rng.choice([-10, -2, -1, 1, 2, 10]))
            second = first + c + (0 if labels[1] else rng.choice([-10, -2, -1, 1, 2, 10]))
            steps = [f"{a} + {b} = {first}", f"{first} + {c} = {second}"]
            made[split].append({"prompt": f"{a} + {b} + {c}", "completions": steps, "labels": labels})
    return made


if __name__ == "__main__":
    for name, found in rows().items():
        text = "".join(json.dumps(row) + "\n" for row in found)
        (Path(__file__).parent / f"{name}.jsonl").write_text(text, encoding="utf-8")
