"""`twofold generate`: greedy answers of a run, an adapter or a model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from twofold.cli.parser import add_command
from twofold.cli.values import positive
from twofold.errors import UserError

Prompt = str | list[dict[str, Any]]


def add(subparsers: Any) -> None:
    """Adds the command."""
    command = add_command(
        subparsers,
        "generate",
        run,
        usage="twofold generate RUN_OR_MODEL (--prompt TEXT | --input FILE.jsonl) [--raw] [--max-new-tokens N]",
        help="answer prompts with a run, an adapter or a model",
        epilog="A TEXT is asked as a user's message where the model has a chat template (--raw: continued as it "
        "is).\nThe rows of FILE have a `prompt` (a text, continued as it is, or messages) or `messages`, whose "
        "last\nassistant turn is left out; an answer is printed as a row {prompt, output}.",
    )
    command.add_argument("path", metavar="RUN_OR_MODEL", help="a run folder, an adapter or model folder, a name")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt; its answer is printed as text")
    source.add_argument("--input", metavar="FILE", help="a .jsonl file of prompts; answers are printed as JSON rows")
    command.add_argument("--raw", action="store_true", help="continue TEXT as it is, without the chat template")
    command.add_argument(
        "--max-new-tokens", metavar="N", type=positive, default=128, help="longest answer in tokens (default: 128)"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the answers."""
    prompts = None if args.input is None else read_prompts(Path(args.input))  # its faults show before the model loads
    from twofold.models.generate import generate_texts, load_for_generation

    model, tokenizer = load_for_generation(args.path)
    if prompts is None:
        as_chat = getattr(tokenizer, "chat_template", None) and not args.raw
        prompt: Prompt = [{"role": "user", "content": args.prompt}] if as_chat else args.prompt
        print(generate_texts(model, tokenizer, [prompt], max_new_tokens=args.max_new_tokens)[0])
        return 0
    outputs = generate_texts(model, tokenizer, prompts, max_new_tokens=args.max_new_tokens)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(json.dumps({"prompt": prompt, "output": output}, ensure_ascii=False))
    return 0


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a .jsonl file ("-": standard input). Raises UserError naming the line that has none."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise UserError(f'{name}: is empty. It should have lines such as {{"prompt": "Hello"}}.')
    return [_prompt(line, f"{name}:{number}") for number, line in lines]


def _prompt(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not valid JSON: {error.msg} (column {error.colno}).") from None
    prompt = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt):
        turns = prompt[:-1] if prompt[-1].get("role") == "assistant" else prompt
        if turns:
            return turns
    found = f"Found: {', '.join(row)}." if isinstance(row, dict) and row else "Found none."
    raise UserError(f"{place}: a row needs a `prompt` (a text or messages) or `messages`. {found}")
