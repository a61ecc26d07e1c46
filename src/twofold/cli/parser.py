"""The commands put together, and the words for what cannot be understood."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import Any, NoReturn

from twofold.errors import UserError, nearest

_DESCRIPTION = """\
Twofold trains PyTorch models: change where it runs, never what it computes."""

_EPILOG = """\
A configuration is one YAML file:
  version: 1
  method: sft
  model: {path: smollm2-135m-instruct, adapter: {kind: lora, r: 16}}
  data: {train: train.jsonl, eval: test.jsonl}
  train: {global_batch_size: 16, max_steps: 60, lr: 5.0e-4, eval_steps: 20}
  run: {devices: 2, strategy: ddp}
All keys: twofold config schema. What a file amounts to: twofold config show CONFIG.
Exit codes: 0 done, 2 something in the input is wrong, 1 a failure, 130 interrupted."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, without a screen of usage before an error, and with suggestions."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """What argparse found wrong, as a UserError with the place to look."""
        raise UserError(f"{message[0].lower()}{message[1:]}. See: {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = "command" if action.dest.endswith("command") else f"value of {action.option_strings[0]}"
            raise UserError(f"unknown {what} '{value}'. {nearest(str(value), map(str, action.choices))}")


def build() -> Parser:
    """The parser of all commands."""
    from twofold.cli import config, data, doctor, export, generate, train

    parser = Parser(prog="twofold", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser, title="commands")
    for module in (train, data, generate, export, doctor, config):
        module.add(commands)
    return parser


def parse(argv: list[str]) -> argparse.Namespace | None:
    """The command to run; None where the answer (help, the version) has been printed.

    What a command with overrides does not know itself and has the form `a.b=c` goes to `args.overrides`.
    Raises UserError for everything else that is not understood.
    """
    parser = build()
    try:
        args, rest = parser.parse_known_args(argv)
    except SystemExit:  # argparse has printed a help text
        return None
    if args.version:
        from twofold import __version__

        print(f"twofold {__version__}")
        return None
    command = getattr(args, "parser", parser)
    if hasattr(args, "overrides"):
        found = [word for word in rest if is_override(word) and not _nearest_option(word, command)]
        args.overrides, rest = [*args.overrides, *found], [word for word in rest if word not in found]
    if rest:
        _refuse(rest[0], command)
    if not hasattr(args, "run"):
        command.print_help()
        return None
    return args


def is_override(word: str) -> bool:
    """Whether a word has the form of an override: `a.b=c` or `--a.b=c`."""
    return "=" in word and (word.startswith("--") or not word.startswith("-"))


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def _nearest_option(word: str, parser: argparse.ArgumentParser) -> str:
    """The option of this command that `--word` may have meant, "" if none comes near."""
    name = word.partition("=")[0]
    return next(iter(get_close_matches(name, _options(parser), n=1, cutoff=0.7)), "") if name.startswith("-") else ""


def _refuse(word: str, parser: argparse.ArgumentParser) -> NoReturn:
    """Says what an argument that nobody knows may have meant."""
    name = word.partition("=")[0]
    if name.startswith("--") and "." in name:
        raise UserError(f"'{word}' has no value. Write it as {name.removeprefix('--')}=VALUE")
    if not name.startswith("-"):
        raise UserError(f"unexpected argument '{word}'. Usage: {usage(parser)}")
    close = _nearest_option(word, parser)
    hint = f"Did you mean '{close}'? " if close else ""
    raise UserError(f"unknown option '{name}'. {hint}Options: {', '.join(sorted(_options(parser)))}.")


def usage(parser: argparse.ArgumentParser) -> str:
    """How the command is written, on one line."""
    return " ".join(parser.format_usage().removeprefix("usage:").split())


def add_command(subparsers: Any, name: str, run: Any, usage: str, help: str, **options: Any) -> Parser:
    """Adds one command; `run(args)` returns its exit code."""
    command = subparsers.add_parser(name, help=help, description=help, usage=usage, **options)
    command.set_defaults(run=run, parser=command)
    return command


def add_config(command: Parser) -> None:
    """The arguments CONFIG and key=value …"""
    command.add_argument("config", metavar="CONFIG", help="the YAML file")
    command.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="change a key, for example train.lr=1e-4 run.devices=2",
    )


def load_config(args: argparse.Namespace, extra: tuple[str, ...] = ()) -> Any:
    """The checked configuration that the arguments name."""
    from twofold.config.load import load
    from twofold.methods import method_options

    if is_override(args.config):
        raise UserError(f"the CONFIG file comes first, then '{args.config}'. Usage: {usage(args.parser)}")
    return load(args.config, [*args.overrides, *extra], method_options())
