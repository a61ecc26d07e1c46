"""The command line of this very program, so that each worker can run it again.

`sys.orig_argv` is what the interpreter was started with; from it we take the interpreter's own options, the
script or module, and its arguments. A program that is not in a file (a notebook, `python -c`, stdin) cannot
be run again and is refused with what to do instead.
"""

import builtins
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twofold.errors import UserError


@dataclass(frozen=True)
class Command:
    """A Python program: `python *options target *arguments`, or `python *options -m target *arguments`."""

    options: tuple[str, ...]
    is_module: bool
    target: str
    arguments: tuple[str, ...]

    @property
    def program(self) -> list[str]:
        """What follows `python` (or `torchrun`) on a command line."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    def import_folder(self) -> str:
        """The folder Python puts first on sys.path for this program; "" where it puts none."""
        if sys.flags.safe_path or (not self.is_module and not os.path.isfile(self.target)):
            return ""  # a folder or a zip archive with a __main__.py: runpy adds it by itself
        return os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.target))


def this_command(devices: int) -> Command:
    """The running program. Raises UserError where it cannot be run again from a file."""
    command = parse(sys.orig_argv)
    place = _unrepeatable_place(command)
    if command is None or place:
        raise UserError(
            f"devices={devices} starts workers that run this program again, which {place} does not allow. "
            f"Put the code in a file and run it as a script (python FILE.py) or under torchrun "
            f"(torchrun --nproc-per-node={devices} FILE.py), or set devices=1."
        )
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not command.is_module and main_file:  # absolute: the program may have changed its working folder
        command = Command(command.options, False, os.path.abspath(main_file), command.arguments)
    return command


def _unrepeatable_place(command: Command | None) -> str:
    """Why this program cannot be run again, as a noun phrase; "" if it can."""
    if hasattr(builtins, "__IPYTHON__"):
        return "a notebook or IPython session"
    if "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        return "a test inside pytest"
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return "an interactive session"
    if command is None:
        return "a program given by -c or stdin"
    if not command.is_module and not Path(command.target).exists():
        return f"a program that is not in a file ({command.target})"
    return ""


def parse(argv: Sequence[str]) -> Command | None:
    """Takes a Python command line apart; argv[0] is the interpreter. None for `-c`, `-` and no program."""
    options: list[str] = []
    words = list(argv[1:])
    while words:
        word = words.pop(0)
        if word == "-":
            return None
        if not word.startswith("-"):
            return Command(tuple(options), False, word, tuple(words))
        if word == "--check-hash-based-pycs":
            options += [word, words.pop(0)]
            continue
        flags, letter, value = (word, "", "") if word.startswith("--") else _split_at_value(word)
        options += [flags] if len(flags) > 1 else []
        if not letter:
            continue
        value = value or (words.pop(0) if words else "")
        if letter == "c":
            return None
        if letter == "m":
            return Command(tuple(options), True, value, tuple(words))
        options += [f"-{letter}", value]
    return None


def _split_at_value(word: str) -> tuple[str, str, str]:
    """Flags, value letter, value: -Bum is ("-Bu", "m", ""), -Wdefault is ("-", "W", "default")."""
    for place, letter in enumerate(word[1:], start=1):
        if letter in "cmWX":
            return word[:place], letter, word[place + 1 :]
    return word, "", ""
