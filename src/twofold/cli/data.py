"""`twofold data`: shows rows as they will be trained, before anything is."""

from __future__ import annotations

import argparse
from typing import Any

from twofold.cli.parser import add_command, add_config, load_config
from twofold.cli.values import positive


def add(subparsers: Any) -> None:
    """Adds the command."""
    command = add_command(
        subparsers,
        "data",
        run,
        usage="twofold data CONFIG [key=value …] [--rows N]",
        help="show rows as they will be trained: text, trained tokens, counts, rows that cannot be trained",
    )
    add_config(command)
    command.add_argument("--rows", metavar="N", type=positive, default=3, help="rows to show (default: 3)")


def run(args: argparse.Namespace) -> int:
    """Prints the preview of the configuration's method."""
    config = load_config(args)
    from twofold.methods import preview_method

    text = preview_method(config, rows=args.rows)
    if text:
        print(text)
    return 0
