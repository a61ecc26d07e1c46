"""The terminal side of the console, drawn by rich: a start panel, and one line that is redrawn in place.

Imported only where a terminal is. Everything is drawn from `Text` objects and markup is off, so that nothing
in a model's name or output is read as a style.

Costs: import 25 to 60 ms; a redraw about 0.2 ms, in the training thread (no thread of its own).
"""

import sys
from collections.abc import Iterable
from typing import IO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


class _Terminal(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor alone: a killed process could not bring it back."""
        return False


class Terminal:
    """Permanent lines, and below them, while it is set, the live line."""

    def __init__(self, stream: IO[str]):
        self._console = _Terminal(
            file=stream, force_terminal=True, markup=False, highlight=False, emoji=False, soft_wrap=True
        )
        self._live: Live | None = None

    @property
    def width(self) -> int:
        return self._console.width

    def panel(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """A framed table of names and values."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        self._console.print(
            Panel(table, title=Text(title, "bold"), title_align="left", box=box.ROUNDED, expand=False),
            soft_wrap=False,
        )

    def line(self, text: str, style: str = "") -> None:
        """A permanent line (or several), above the live one."""
        self._console.print(Text(text, style))

    def draw(self, done: float, text: str) -> None:
        """Redraws the live line: a bar that is filled to `done` (0 … 1), then `text`, cut to the width."""
        width = 22 if self.width >= 80 else 10
        filled = int(min(1.0, max(0.0, done)) * width)
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append("━" * filled, "green").append("━" * (width - filled), "bright_black").append(" " + text)
        # The empty line beneath keeps the cursor in the first column: what a killed run's parent prints next
        # does not start in the middle of a line.
        shown = Group(line, Text(""))
        if self._live is None:
            # What the program prints appears above the live line; a redirected stream is left where it goes.
            self._live = Live(
                shown,
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start(refresh=True)
        else:
            self._live.update(shown, refresh=True)

    def stop(self) -> None:
        """Takes the live line away and gives stdout and stderr back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
