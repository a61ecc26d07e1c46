"""The demo: a real model learns a business task on two CPU cores, and is measured before and after.

SmolLM2-135M-Instruct turns support tickets into JSON with fixed fields. Both evaluations answer the same 120
held-out tickets greedily; an answer counts as exact when it is the right JSON object, field by field.

    make demo
"""

import json
import subprocess
import sys
import time
from pathlib import Path

TICKETS = Path(__file__).parent / "tickets"
sys.path.insert(0, str(TICKETS))

from score import FIELDS, score  # noqa: E402 (it lies beside the data)

MODEL = "smollm2-135m-instruct"


def main() -> int:
    began = time.time()
    rows = [json.loads(line) for line in (TICKETS / "test.jsonl").open(encoding="utf-8")]
    tickets = [row["messages"][:-1] for row in rows]
    wanted = [row["messages"][-1]["content"] for row in rows]

    say("1/4  The model as it comes (the first time, it is unpacked: half a minute)")
    before, answers_before = evaluate(MODEL, tickets, wanted)

    say("2/4  Training: twofold train examples/tickets/config.yaml")
    name = time.strftime("tickets-%Y%m%d-%H%M%S")
    command = [sys.executable, "-m", "twofold", "train", str(TICKETS / "config.yaml"), f"run.name={name}"]
    started = time.time()
    code = subprocess.run(command, check=False).returncode
    if code:
        return code
    trained_seconds = time.time() - started
    run = Path("runs") / name

    say("3/4  The trained model")
    after, answers_after = evaluate(str(run), tickets, wanted)

    say(f"4/4  {len(rows)} held-out tickets, before and after {trained_seconds:.0f} s of training")
    print(f"{'':12}{'before':>9}{'after':>9}")
    for key, label in (("valid_json", "valid JSON"), ("exact", "exact")):
        print(f"{label:12}{before[key]:>9.1%}{after[key]:>9.1%}")
    for field in FIELDS:
        print(f"  {field:10}{before['fields'][field]:>9.1%}{after['fields'][field]:>9.1%}")
    for i in (0, len(rows) // 2):
        print(f"\nticket   {tickets[i][-1]['content']!r}\nwanted   {wanted[i]}")
        print(f"before   {answers_before[i]!r}\nafter    {answers_after[i]}")
    print(f"\nrun      {run}/ (config.yaml, metrics.jsonl, logs/, checkpoints/)")
    print(f"adapter  {run}/export/ (a PEFT folder)")
    print(f"try it   .venv/bin/twofold generate {run} --input {TICKETS / 'test.jsonl'}")
    print(
        f"result: exact_before={before['exact']:.3f} exact_after={after['exact']:.3f} seconds={time.time() - began:.0f}"
    )
    return 0


def evaluate(path: str, tickets: list, wanted: list[str]) -> tuple[dict, list[str]]:
    """(scores, answers) of a model on the held-out tickets."""
    from twofold.models.generate import generate_texts, load_for_generation

    started = time.time()
    model, tokenizer = load_for_generation(path)
    answers = generate_texts(model, tokenizer, tickets, max_new_tokens=48, batch_size=40)
    found = score(answers, wanted)
    print(
        f"     {found['exact']:.1%} exact, {found['valid_json']:.1%} valid JSON, {time.time() - started:.0f} s",
        flush=True,
    )
    return found, answers


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
