"""Numbers, durations and foreign texts as people read them on a terminal. Pure functions."""

import math
from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"
# What a terminal would obey instead of show: C0 and C1 controls (newline apart), and those that reorder a line.
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(10), *range(11, 32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F),
                 *range(0x2066, 0x206A))
} | {ord("\t"): "  ", ord("\r"): "\\r"}  # fmt: skip


def number(value: float) -> str:
    """4 significant digits: 2.300, 0.01234, 1.000e-05; whole numbers as they are."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:#.4g}".rstrip(".")


def rate(value: float) -> str:
    """Three digits or the whole number: 0.0123, 12.3, 10,656."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def learning_rate(value: float) -> str:
    """5.0e-04; one more digit where it would be lost (2.25e-05)."""
    short = f"{value:.1e}"
    return short if math.isclose(float(short), value, rel_tol=1e-3) or value == 0 else f"{value:.2e}"


def clock(seconds: float | None) -> str:
    """Time to go: 0:07, 12:30, 1:02:03, 2d 03h; "-:--" where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def duration(seconds: float) -> str:
    """Time that has passed: 0.4 s, 12 s, 1 min 12 s, 2 h 03 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def size(count: float) -> str:
    """Bytes as 512 B, 45 kB, 1.2 MB, 3.4 GB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 9.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The course of `values` in at most `width` characters; values that are not finite are left out."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    count = min(width, len(finite))
    edges = [i * len(finite) // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in means)


def visible(text: str) -> str:
    """`text` with every character that a terminal would obey (escapes, bells, reordering) written out."""
    return text.translate(_CONTROLS)


def excerpt(text: str, *, lines: int = 8, columns: int = 400) -> list[str]:
    """The beginning of a foreign text as safe lines, with "… (N more characters)" where it is cut."""
    shown, kept = [], 0
    for line in text.split("\n")[:lines]:
        shown.append(visible(line[:columns]))
        kept += min(len(line), columns) + 1
        if len(line) > columns:
            break
    left = len(text) + 1 - kept
    if left > 0:
        shown[-1] += f" … ({left:,} more character{'s' * (left > 1)})"
    return shown
