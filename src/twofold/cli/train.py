"""`twofold train`: trains as a configuration says."""

from __future__ import annotations

import argparse
from typing import Any

from twofold.cli.parser import add_command, add_config, load_config

_KEYS = """\
keys that change most often (all of them: twofold config schema):
  model.path               the model: a folder or a name
  model.adapter            null = all parameters, lora = an adapter
  model.adapter.r          rank of the adapter
  data.train, data.eval    the rows: .jsonl .json .csv .parquet .txt or a folder
  train.global_batch_size  samples of one step, over all ranks
  train.max_steps          number of steps (or train.max_epochs)
  train.lr                 learning rate
  train.eval_steps         evaluate every so many steps
  run.devices              number of devices
  run.strategy             how the work is spread over them
  run.name                 the run leaves everything in runs/NAME"""


def add(subparsers: Any) -> None:
    """Adds the command."""
    command = add_command(
        subparsers,
        "train",
        run,
        usage="twofold train CONFIG [key=value …] [--resume]",
        help="train as a configuration says",
        epilog=_KEYS,
    )
    add_config(command)
    command.add_argument("--resume", action="store_true", help="go on from the run's latest checkpoint")


def run(args: argparse.Namespace) -> int:
    """Trains; several devices are started and waited for inside."""
    config = load_config(args, extra=("run.resume=true",) if args.resume else ())
    from twofold.methods import run_method

    run_method(config)
    return 0
