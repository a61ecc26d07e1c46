"""What the user gets to read when something is wrong.

A `UserError` means that the user's input is at fault: the command line prints its text (problem, then
remedy; no traceback) and exits with code 2. Every other exception is a failure of ours or of the machine:
exit code 1 and the traceback of its root.
"""

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from types import TracebackType

EXIT_DONE, EXIT_FAILURE, EXIT_USER = 0, 1, 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class UserError(Exception):
    """The user's input is at fault. The text is one clear line (or one line per fault) with the remedy."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the known word nearest to `word`, and all known ones: "Did you mean 'x'? Known: x, y"."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    return f"{hint}Known: {', '.join(known)}."


def show_plainly() -> None:
    """Lets a UserError that nobody catches end a script with its text and exit code 2, without a traceback."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            return before(kind, error, trace)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER)

    sys.excepthook = hook
