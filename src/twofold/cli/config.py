"""`twofold config schema` and `twofold config show`: all keys there are; what a file amounts to."""

from __future__ import annotations

import argparse
from typing import Any

from twofold.cli.parser import Parser, add_command, add_config
from twofold.errors import UserError


def add(subparsers: Any) -> None:
    """Adds the command and its two sub-commands."""
    command: Parser = subparsers.add_parser(
        "config",
        help="print all keys (schema), or what a file amounts to (show)",
        usage="twofold config schema | show CONFIG [key=value …]",
    )
    command.set_defaults(parser=command)
    inner = command.add_subparsers(dest="config_command", metavar="COMMAND", parser_class=Parser, title="commands")
    add_command(
        inner,
        "schema",
        schema,
        usage="twofold config schema",
        help="print the JSON schema of a configuration; "
        "editors use it after a first line '# yaml-language-server: $schema=schema.json'",
    )
    shown = add_command(
        inner,
        "show",
        show,
        usage="twofold config show CONFIG [key=value …]",
        help="print the whole configuration, and where each value was given",
    )
    add_config(shown)


def schema(args: argparse.Namespace) -> int:
    """Prints the JSON schema."""
    import json

    from twofold.config.load import json_schema
    from twofold.methods import method_options

    print(json.dumps(json_schema(method_options()), indent=2, ensure_ascii=False))
    return 0


def show(args: argparse.Namespace) -> int:
    """Prints the configuration as YAML with the origin of each value."""
    from twofold.cli.parser import is_override, usage
    from twofold.config.load import dump, load_with_origins
    from twofold.methods import method_options

    if is_override(args.config):
        raise UserError(f"the CONFIG file comes first, then '{args.config}'. Usage: {usage(args.parser)}")
    config, origins = load_with_origins(args.config, args.overrides, method_options())
    print(dump(config, origins), end="")
    return 0
