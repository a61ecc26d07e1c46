"""The command line: one file per command, each with `add(subparsers)` and `run(args)`.

Promises: `--help` answers in under 0.3 s (a command imports what it needs when it runs); an error is the last
thing said and short; a fault of the user's input ends with exit code 2 and no traceback, Ctrl-C with 130, any
other failure with its traceback and 1. Options are never abbreviated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from twofold.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command (None: the one of this process) and returns the exit code. Failures of ours are raised."""
    from twofold.cli import parser

    try:
        args = parser.parse(list(sys.argv[1:] if argv is None else argv))
        if args is None:
            return EXIT_DONE
        return args.run(args)
    except UserError as error:
        if _agent_will_tell():
            raise
        tell(error)
        return EXIT_USER
    except KeyboardInterrupt:
        if _agent_will_tell():
            raise
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `twofold config schema | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def tell(error: UserError) -> None:
    """Prints a user's error; further lines stand under the first."""
    print("error: " + str(error).replace("\n", "\n       "), file=sys.stderr)


def _agent_will_tell() -> bool:
    """Whether this is a worker whose agent (or driver) gets its errors and prints the one that counts."""
    from twofold.mesh.guard import DRIVER_TELLS_VARIABLE, LOG_DIR_VARIABLE

    return LOG_DIR_VARIABLE in os.environ or DRIVER_TELLS_VARIABLE in os.environ
