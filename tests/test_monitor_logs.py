"""Log records of every rank, warnings, the chatter of libraries; memory of the process."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

from twofold.monitor.memory import host_memory_mb, process_memory_mb, total_memory_gb

SAY = """
    import logging, sys, warnings
    from twofold.monitor.logs import setup_logging
    setup_logging(sys.argv[1], int(sys.argv[2]))
    logging.getLogger("twofold.engine").setLevel(logging.INFO)
    logging.getLogger("twofold.engine").info("for the file")
    logging.getLogger("somebody").warning("careful")
    logging.getLogger("somebody").warning("careful")
    for _ in range(3):
        warnings.warn("old way", FutureWarning)
    warnings.warn_explicit("advice", UserWarning, "/x/site-packages/peft/tuner.py", 7)
    logging.getLogger("transformers.x").warning("[chatter]")
    logging.getLogger("transformers.x").error("cannot load")
"""


def run(code, *arguments, **environment):
    """(stdout, stderr) of a program."""
    cleaned = {name: value for name, value in os.environ.items() if not name.endswith("DISABLE_PROGRESS_BARS")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**cleaned, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("rank", [0, 3])
def test_where_records_go(tmp_path, rank):
    out, errors = run(SAY, tmp_path / "logs", rank)
    records = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
    start = re.compile(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} rank {rank} [A-Z]+ [a-z._]+: ")
    assert all(start.match(record) for record in records)
    told = [start.sub("", record) for record in records]
    assert re.fullmatch(rf"rank {rank}, process \d+ on \S+", told[0])
    assert told[1:] == [
        "for the file",
        "careful",
        "careful",
        "FutureWarning: old way (<string>:10)",  # Python's own filter: once for a place
        "UserWarning: advice (/x/site-packages/peft/tuner.py:7)",
        "[chatter]",
        "cannot load",
    ]
    assert out == ""
    shown = ["warning: careful", "warning: FutureWarning: old way (<string>:10)", "error: cannot load"]
    assert errors.splitlines() == (shown if rank == 0 else [])


def test_a_program_with_its_own_handlers_keeps_them(tmp_path):
    code = """
        import logging, sys
        logging.basicConfig(format="MINE %(message)s")
        from twofold.monitor.logs import setup_logging
        for folder in ("a", "b"):
            setup_logging(f"{sys.argv[1]}/{folder}", 0)
            logging.getLogger("somebody").warning("in " + folder)
        logging.getLogger("transformers.x").warning("chatter")
    """
    _, errors = run(code, tmp_path)
    assert errors.splitlines() == ["MINE in a", "MINE in b"]
    for folder, other in ("ab", "ba"):  # a second run in the same program has a log of its own
        text = (tmp_path / folder / "rank-0.log").read_text()
        assert f"in {folder}" in text
        assert f"in {other}" not in text


LIBRARIES = """
    import sys
    def ours():
        from twofold.monitor.logs import setup_logging
        setup_logging(sys.argv[1], 0)
    if sys.argv[2] == "before": ours()
    import datasets, transformers
    if sys.argv[2] == "after": ours()
    from transformers.utils import logging
    from datasets.utils.logging import get_logger
    logging.get_logger("transformers.trainer").warning("chatter of transformers")
    logging.get_logger("transformers.trainer").error("trouble")
    get_logger("datasets.builder").warning("chatter of datasets")
    rows = datasets.Dataset.from_list([{"a": 1}] * 10).map(lambda row: {"b": 2})
    for _ in logging.tqdm(range(3)): pass
"""


def test_libraries_keep_to_the_file(tmp_path):
    """With the real ones, imported before and after: no bars, no advice on the console."""
    _, loud = run(LIBRARIES, tmp_path, "never")
    assert "chatter of transformers" in loud  # else this test shows nothing
    assert "Map" in loud
    for when in ("before", "after"):
        _, errors = run(LIBRARIES, tmp_path / when, when)
        assert errors.splitlines() == ["error: trouble"]
        log = (tmp_path / when / "rank-0.log").read_text()
        assert "WARNING transformers.trainer: chatter of transformers" in log
        assert "WARNING datasets.builder: chatter of datasets" in log


def test_nothing_heavy_is_imported():
    code = """
        import sys
        from twofold.monitor import callback, console, logs, memory, metrics, run_folder, status
        memory.process_memory_mb()
        heavy = ("torch", "transformers", "datasets", "peft", "rich", "pydantic", "numpy")
        print([name for name in heavy if name in sys.modules])
    """
    assert run(code)[0] == "[]\n"


# --- memory ---


def test_memory_sees_what_is_held_and_remembers_the_peak():
    code = """
        from twofold.monitor.memory import process_memory_mb
        before = process_memory_mb()
        block = bytearray(b"x") * (200 * 1024 * 1024)
        held = process_memory_mb()
        del block
        after = process_memory_mb()
        print(*before[:2], *held[:2], *after[:2])
    """
    now, _, held, peak, after, remembered = map(float, run(code)[0].split())
    assert held - now == pytest.approx(200, abs=5)
    assert peak - now == pytest.approx(200, abs=5)
    assert after - now == pytest.approx(0, abs=5)
    assert remembered - peak == pytest.approx(0, abs=1)


def test_a_childs_peak_is_its_own():
    """getrusage's peak of a child starts at its parent's: a worker would show the agent's memory."""
    code = """
        import subprocess, sys
        block = bytearray(b"x") * (300 * 1024 * 1024)
        child = "from twofold.monitor.memory import process_memory_mb; print(process_memory_mb().peak)"
        subprocess.run([sys.executable, "-c", child], close_fds=False)
    """
    assert float(run(code)[0]) < 100


def test_cuda_memory_is_the_gpus(monkeypatch):
    import torch

    assert process_memory_mb().where == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * 1024**2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7 * 1024**2)
    assert process_memory_mb() == (3.0, 7.0, "cuda")
    assert host_memory_mb().where == "cpu"


def test_memory_of_the_machine():
    with open("/proc/meminfo") as file:
        kilobytes = int(file.readline().split()[1])
    assert total_memory_gb() == pytest.approx(kilobytes / 1024**2, rel=0.02)
