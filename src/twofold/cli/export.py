"""`twofold export`: writes a run's model as a folder that transformers and PEFT load."""

from __future__ import annotations

import argparse
from typing import Any

from twofold.cli.parser import add_command


def add(subparsers: Any) -> None:
    """Adds the command."""
    command = add_command(
        subparsers,
        "export",
        run,
        usage="twofold export RUN [--merge] [--output DIR] [--checkpoint latest|best]",
        help="write the model of a run as a folder that transformers and PEFT load",
    )
    command.add_argument("run_folder", metavar="RUN", help="the run folder, for example runs/NAME")
    command.add_argument("--merge", action="store_true", help="merge the adapter into the model")
    command.add_argument(
        "--output", metavar="DIR", help="where to write (default: RUN/export, merged RUN/export-merged)"
    )
    command.add_argument(
        "--checkpoint", choices=("latest", "best"), help="which one (default: best, or latest without evaluation)"
    )


def run(args: argparse.Namespace) -> int:
    """Exports and prints where the model lies."""
    from twofold.methods import export_run

    print(export_run(args.run_folder, output=args.output, merge=args.merge, checkpoint=args.checkpoint))
    return 0
