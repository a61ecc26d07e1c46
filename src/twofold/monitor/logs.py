"""Log records: every rank's into its own file, and only what a person must see on the console.

`setup_logging` is called once per process, before libraries are imported or after. Then
- every record that passes its logger's level (WARNING, unless the program sets another) goes to
  LOG_DIR/rank-R.log with time and rank;
- on rank 0, warnings and errors appear on stderr too, each text once;
- Python's `warnings` are records like others;
- transformers, datasets, peft and huggingface_hub keep to the file with all but errors, and draw no progress
  bars.
Handlers that the program has set up itself stay as they are.

Costs: 10 µs a record.
"""

import logging
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

_LIBRARIES = ("transformers", "datasets", "peft", "huggingface_hub")
_NO_BARS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
_FILE_FORMAT = "%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"
_installed: list[logging.Handler] = []


def setup_logging(log_dir: str | Path, rank: int) -> Path:
    """Sends this process's log records where they belong (see above); returns the path of its log file.

    A second call moves the records on to another folder. Raises OSError where the file cannot be written.
    """
    path = Path(log_dir) / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, mode="a", encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter(_FILE_FORMAT.format(rank=rank)))
    root = logging.getLogger()
    _remove(_installed)
    root.addHandler(file)
    _installed.append(file)
    if rank == 0 and all(isinstance(handler, logging.FileHandler) for handler in root.handlers):
        console = _Console(logging.WARNING)
        root.addHandler(console)
        _installed.append(console)
    _quiet_libraries([file, _Console(logging.ERROR)] if rank == 0 else [file])
    _stop_progress_bars()
    warnings.showwarning = _log_warning
    begin = f"rank {rank}, process {os.getpid()} on {platform.node()}"
    file.handle(logging.LogRecord(__name__, logging.INFO, __file__, 0, begin, (), None))
    return path


class _Console(logging.StreamHandler):
    """To the stderr of the moment (which a live line replaces by its own), each text once."""

    def __init__(self, level: int):
        logging.Handler.__init__(self, level)
        self.setFormatter(_Short())
        self._shown: set[str] = set()

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if text not in self._shown and not getattr(record, "from_library", False):
            self._shown.add(text)
            super().emit(record)


class _Short(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


class _LibraryLogger(logging.Logger):
    """A library's topmost logger, whose own console handler (added when it is imported) never takes hold."""

    def addHandler(self, handler: logging.Handler) -> None:
        if type(handler) is not logging.StreamHandler:
            super().addHandler(handler)

    @property
    def propagate(self) -> bool:
        return False

    @propagate.setter
    def propagate(self, value: bool) -> None:
        pass


def _quiet_libraries(handlers: Sequence[logging.Handler]) -> None:
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        logger.__class__ = _LibraryLogger
        for own in [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]:
            logger.removeHandler(own)
        for handler in handlers:
            logger.addHandler(handler)
    _installed.extend(handlers)


def _stop_progress_bars() -> None:
    """By variables for libraries that are still to be imported, by their own switch for the others."""
    for name, value in _NO_BARS.items():
        os.environ.setdefault(name, value)
    if os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1" and "transformers.utils.logging" in sys.modules:
        sys.modules["transformers.utils.logging"].disable_progress_bar()
    if os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] == "1" and "datasets.utils.tqdm" in sys.modules:
        sys.modules["datasets.utils.tqdm"].disable_progress_bars()


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Takes the place of `warnings.showwarning`."""
    if file is not None:
        file.write(warnings.formatwarning(message, category, filename, lineno, line))
        return
    by_library = any(f"{os.sep}{name}{os.sep}" in filename for name in _LIBRARIES)
    logging.getLogger("py.warnings").warning(
        "%s: %s (%s:%d)", category.__name__, message, filename, lineno, extra={"from_library": by_library}
    )


def _remove(handlers: list[logging.Handler]) -> None:
    """Takes our handlers of an earlier call away."""
    loggers = [logging.getLogger(name) for name in ("", *_LIBRARIES)]
    for handler in handlers:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
    handlers.clear()
