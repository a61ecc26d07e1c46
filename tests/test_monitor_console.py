"""What a person sees of a run: in a file, through a pipe, on a terminal."""

import io
import math
import os
import pty
import re
import select
import subprocess
import sys
import textwrap

import pytest

from twofold.errors import UserError
from twofold.monitor.callback import Callback
from twofold.monitor.console import Console
from twofold.monitor.metrics import MetricsFile
from twofold.monitor.status import Status
from twofold.monitor.text import clock, duration, excerpt, learning_rate, number, rate, size, sparkline, visible

INFO = {
    "model": "SmolLM2-135M [bold]",
    "layout": "ddp over 2 ranks",
    "run": "runs/x",
    "max_steps": 60,
    "start_step": 0,
}
ROW = {"step": 10, "split": "train", "loss": 1.23456, "lr": 5e-4, "grad_norm": 0.98765, "tokens": 9999,
       "tokens_per_second": 10656.4, "memory_mb": 900.0, "epoch": 0.5, "accuracy": 0.875}  # fmt: skip
HOSTILE = '[red]not red[/red] [/] \x1b[2J\x1b]0;title\x07 {\n  "id": 1\n}'
SUMMARY = {
    "steps": 60, "seconds": 72.4, "loss": 0.12345, "best_loss": 0.2, "best_step": 40,
    "run": "runs/x", "export": "runs/x/export", "next": ["twofold generate runs/x", "twofold export runs/x"],
}  # fmt: skip

# The same run for every kind of output; `wait()` is called between the log rows.
RUN = f"""
import sys
from twofold.monitor.console import Console
def wait(): pass
INFO, ROW, HOSTILE, SUMMARY = {INFO!r}, {ROW!r}, {HOSTILE!r}, {SUMMARY!r}
def begin(**arguments):
    console = Console(**arguments)
    console.on_start(INFO)
    return console
def run(console):
    console.on_step(10)
    console.on_log(ROW)
    wait()
    console.on_eval({{"step": 10, "split": "eval", "loss": 0.45674, "best": True}})
    console.on_samples(10, [{{"prompt": "Say it", "output": HOSTILE, "reference": None}}])
    console.on_checkpoint(10, "runs/x/checkpoints/step-00000010", 0.42, 45_100_000)
    console.on_warning("2 rows [b]skipped")
    console.on_warning("2 rows [b]skipped")
"""
PLAIN = """\
model   SmolLM2-135M [bold]
layout  ddp over 2 ranks
run     runs/x
step 10/60  loss 1.235  lr 5.0e-04  grad 0.9877  accuracy 0.8750  10,656 tok/s  ETA 0:00
eval  step 10  loss 0.4567 (best)
sample 1 of 1, step 10
  prompt    Say it
  output    [red]not red[/red] [/] \\x1b[2J\\x1b]0;title\\x07 {
              "id": 1
            }
saved runs/x/checkpoints/step-00000010  (45 MB, 0.4 s)
warning: 2 rows [b]skipped
done: 60 steps in 1 min 12 s, loss 0.1235, best eval loss 0.2000 at step 40
run     runs/x
export  runs/x/export
next    twofold generate runs/x
        twofold export runs/x
"""


def start(code, **options):
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    return subprocess.Popen([sys.executable, "-c", RUN + textwrap.dedent(code)], env=environment, **options)


# --- not a terminal ---


def test_plain_lines():
    heavy = "print(sorted(name for name in ('rich', 'torch') if name in sys.modules))"
    with start(f"c = begin(); run(c); c.on_end(SUMMARY); {heavy}", stdout=subprocess.PIPE, text=True) as process:
        out = process.communicate(timeout=20)[0]
    assert re.sub(r"ETA \S+", "ETA 0:00", out) == PLAIN + "[]\n"


def test_plain_lines_are_there_at_once():
    """Kind 17: what goes to a pipe or a cluster's log appears line by line, not when the run ends."""
    code = "wait = input\nrun(begin())"
    with start(code, stdout=subprocess.PIPE, stdin=subprocess.PIPE, bufsize=0) as process:
        lines = []
        while not lines or not lines[-1].startswith(b"step 10/60"):
            assert select.select([process.stdout], [], [], 20)[0], f"nothing more after {lines}"
            lines.append(process.stdout.readline())
        assert process.poll() is None  # it goes on only now
        out, _ = process.communicate(b"\n", timeout=20)
    assert b"warning: " in out


def test_off_leaves_warnings_and_the_end():
    out = io.StringIO()
    console = Console("off", out)
    scope: dict = {}
    exec(RUN, scope)
    console.on_start(INFO)
    scope["run"](console)
    assert out.getvalue() == "warning: 2 rows [b]skipped\n"
    console.on_end(SUMMARY)
    assert "done: 60 steps" in out.getvalue()
    assert "runs/x/export" in out.getvalue()


def test_a_resumed_run_and_an_early_end():
    out = io.StringIO()
    console = Console(stream=out)
    console.on_start({**INFO, "start_step": 20})
    console.on_checkpoint(40, "runs/x/checkpoints/step-00000040", 12.3, 999)
    console.on_error(KeyboardInterrupt(), 47)
    assert "resume  after step 20\n" in out.getvalue()
    assert re.search(r"stopped after step 47 of 60 \(0\.\d s\)\n", out.getvalue())
    assert "runs/x/checkpoints/step-00000040 (--resume)\n" in out.getvalue()
    console = Console(stream=out)
    console.on_error(ValueError("before the start"), 0)
    assert "failed after step 0" in out.getvalue()


def test_eta_counts_the_steps_of_this_process(monkeypatch):
    import twofold.monitor.console as module

    now, out = [50.0], io.StringIO()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    console = Console(stream=out)
    console.on_start({"max_steps": 1000, "start_step": 500})
    now[0] += 60  # 100 steps in a minute leave 400: four minutes
    console.on_log({"step": 600, "loss": math.nan, "samples": 3200, "samples_per_second": 53.333})
    assert out.getvalue().splitlines()[-1] == "step  600/1000  loss nan  53.3 samples/s  ETA 4:00"


def test_a_stream_that_cannot_show_a_character_or_is_gone():
    raw = io.BytesIO()
    console = Console(stream=io.TextIOWrapper(raw, encoding="ascii"))
    console.on_warning("größer ✓")
    assert raw.getvalue() == b"warning: gr\\xf6\\xdfer \\u2713\n"
    reader, writer = os.pipe()
    os.close(reader)
    console = Console(stream=io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True))
    console.on_warning("a")
    console.on_log(ROW)  # the run goes on


def test_unknown_progress():
    with pytest.raises(UserError, match=r"run\.progress: unknown value 'ritch'. Did you mean 'rich'\?"):
        Console("ritch")


def test_only_rank_zero():
    """What writes to the console or the run folder is for rank 0 alone; a user's callback for every rank."""
    assert Console.rank_zero_only
    assert MetricsFile.rank_zero_only
    assert Status.rank_zero_only
    assert not Callback.rank_zero_only


def test_every_event_is_a_no_op_in_the_base():
    events = {name for name in vars(Callback) if name.startswith("on_")}
    assert events == {
        "on_start", "on_step", "on_log", "on_eval", "on_samples", "on_checkpoint", "on_warning", "on_end", "on_error",
    }  # fmt: skip
    for kind in (Console, MetricsFile, Status):
        assert {name for name in vars(kind) if name.startswith("on_")} <= events  # a slip of the pen is no handler


# --- a terminal ---

WIDTH = 100


class Screen:
    """A terminal of endless height: what a person sees after the bytes that came. Obeys what the console
    uses (new lines, carriage return, cursor up, erase, colours) and refuses everything else.
    """

    def __init__(self):
        self.lines, self.y, self.x = [""], 0, 0

    def feed(self, text):
        pattern = r"\x1b\[([0-9;?]*)([A-Za-z])|([\x00-\x1f\x7f-\x9f])|([^\x00-\x1f\x7f-\x9f]+)"
        at = 0
        for found in re.finditer(pattern, text):
            assert found.start() == at, f"unexpected {text[at : found.start()]!r}"
            at = found.end()
            number, command, control, plain = found.groups()
            if plain:
                line = self.lines[self.y].ljust(self.x)
                self.lines[self.y] = line[: self.x] + plain + line[self.x + len(plain) :]
                self.x += len(plain)
            elif control == "\n":
                self.y += 1
                self.lines += [""] * (self.y + 1 - len(self.lines))
            elif control == "\r":
                self.x = 0
            elif command == "A":
                self.y = max(0, self.y - int(number or 1))
            elif (command, number) == ("K", "2"):
                self.lines[self.y] = ""
            else:
                assert command == "m", f"unexpected {found.group()!r}"
        assert at == len(text)
        return self


def terminal(code):
    """What a program leaves on a terminal of 100 columns: (all bytes as text, the final screen)."""
    import fcntl
    import struct
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    received = b""
    with start(code, stdin=child, stdout=child, stderr=child) as process:
        os.close(child)
        while select.select([parent], [], [], 20)[0]:
            try:
                received += os.read(parent, 65536)
            except OSError:  # everyone has closed the other end
                break
        process.wait(timeout=20)
    os.close(parent)
    text = received.decode()
    return text, Screen().feed(text).lines


LIVE = r"━+ 10/60 loss 1\.235 ▁█ 10,656 tok/s ETA \d+:\d\d"


def test_terminal_draws_and_cleans_up():
    text, screen = terminal(
        """
        c = begin()
        c.on_log({**ROW, "loss": 0.5})
        run(c)
        c._draw()
        print("from [b]the[/b] program", end="!", flush=True)
        print("to stderr", file=sys.stderr)
        c._draw()
        c.on_end(SUMMARY)
        print("after")
        """
    )
    assert re.search(LIVE, re.sub(r"\x1b\[[0-9;]*m", "", text))
    assert "\x1b[?25l" not in text  # a cursor that is hidden stays hidden when the process is killed
    assert screen[0].startswith("╭─ twofold ─")
    assert all(len(line) == len(screen[0]) for line in screen[:5])
    plain = PLAIN.splitlines()
    assert [line.strip("│ ") for line in screen[1:4]] == plain[:3]
    assert screen[4].startswith("╰─")
    # The rest reads as it does in a file, without the step lines and with what the program has printed.
    told = plain[4:12]
    end = plain[12:]
    assert screen[5:] == [*told, "from [b]the[/b] program!", "to stderr", *end, "after", ""]


def test_terminal_live_line_is_cut_to_the_width():
    text, _ = terminal("c = begin(); c._max_steps = 10 ** 90; c.on_log(ROW); c._draw(); c.on_end(SUMMARY)")
    shown = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    live = [line for line in re.split(r"[\r\n]+", shown) if "━" in line]
    assert live
    assert max(map(len, live)) == WIDTH


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="the child reads its own source in /proc")
def test_a_killed_run_leaves_the_terminal_in_order():
    """The next print (the agent's root cause) starts in the first column, below the last live line."""
    text, screen = terminal(
        """
        import os, subprocess
        run_ = "import os; c = begin(); c.on_step(10); c.on_log(ROW); c._draw(); os.kill(os.getpid(), 9)"
        source = open("/proc/self/cmdline").read().split("\\0")[2].split("import os, subprocess")[0]
        subprocess.run([sys.executable, "-c", source + run_])
        print("rank 1 of 2 failed", flush=True)
        """
    )
    assert "\x1b[?25l" not in text
    assert re.match(r"━+ 10/60 loss 1\.235 10,656 tok/s ETA", screen[5])
    assert screen[6:] == ["rank 1 of 2 failed", ""]


def test_terminal_after_an_error():
    _, screen = terminal(
        """
        c = begin()
        try:
            c.on_step(3)
            raise ValueError("loss is NaN")
        except ValueError as error:
            c.on_error(error, 3)
            raise
        """
    )
    assert screen[5].startswith("failed after step 3 of 60 (")
    assert screen[6] == "run  runs/x"
    assert screen[7] == "Traceback (most recent call last):"
    assert screen[-2:] == ["ValueError: loss is NaN", ""]


def test_plain_can_be_had_on_a_terminal_and_stderr_elsewhere(tmp_path):
    text, _ = terminal("c = begin(progress='plain'); run(c)")
    assert "\x1b[" not in text.replace("\\x1b[", "")
    errors = tmp_path / "errors"
    terminal(f"sys.stderr = open({str(errors)!r}, 'w'); c = begin(); print('kept', file=sys.stderr); c.on_end(SUMMARY)")
    assert errors.read_text() == "kept\n"


# --- numbers and texts ---


def test_numbers():
    assert [number(v) for v in (2.3, 0.0123456, 1234.4, 12345.6, 1e-5, 7, 123456, math.nan)] == [
        "2.300", "0.01235", "1234", "1.235e+04", "1.000e-05", "7", "123,456", "nan",
    ]  # fmt: skip
    assert [learning_rate(v) for v in (5e-4, 2.25e-5, 0, 1 / 3)] == ["5.0e-04", "2.25e-05", "0.0e+00", "3.33e-01"]
    assert [rate(v) for v in (10656.4, 100, 99.94, 0.01234)] == ["10,656", "100", "99.9", "0.0123"]
    assert [clock(v) for v in (0.4, 59.6, 3599.6, 3723, 2 * 86400 + 3 * 3600, None, math.inf)] == [
        "0:00", "1:00", "1:00:00", "1:02:03", "2d 03h", "-:--", "-:--",
    ]  # fmt: skip
    assert [duration(v) for v in (0.42, 9.96, 59.4, 72.4, 3600, 7380)] == [
        "0.4 s", "10 s", "59 s", "1 min 12 s", "1 h 00 min", "2 h 03 min",
    ]  # fmt: skip
    assert [size(v) for v in (0, 999, 1000, 45_100_000, 999_999, 2.5e12)] == [
        "0 B", "999 B", "1.0 kB", "45 MB", "1.0 MB", "2.5 TB",
    ]  # fmt: skip


def test_sparkline():
    assert sparkline([0, 7]) == "▁█"
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 1.0]) == "▁▁"
    assert sparkline([math.nan]) == sparkline([]) == ""
    assert sparkline([float(i // 100) for i in range(800)], width=8) == "▁▂▃▄▅▆▇█"


def test_foreign_texts_are_shown_and_not_obeyed():
    assert visible("a\x1b[31m\x07\r\tä\u202e\x9b") == "a\\x1b[31m\\x07\\r  ä\\u202e\\x9b"
    assert excerpt("one\ntwo") == ["one", "two"]
    assert excerpt("") == [""]
    assert excerpt("abcdef", columns=4) == ["abcd … (2 more characters)"]
    assert excerpt("a\nb\nc\nd", lines=2) == ["a", "b … (4 more characters)"]
    assert excerpt("a\nb\n", lines=2) == ["a", "b … (1 more character)"]
