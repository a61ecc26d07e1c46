"""`twofold doctor` tells what there is and never dies of what there is not."""

import subprocess
import sys
from importlib import metadata, util
from typing import Any

import pytest

from twofold.cli import doctor, main


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = lines(capsys)
    for name in ("torch", "transformers", "peft", "datasets"):
        assert f"  {name:<13} {metadata.version(name)}" in said
    assert [line for line in said if not line.startswith(" ")][:-1] == ["versions", "devices", "space", "missing"]
    assert said[-1].startswith("ready for: ")
    assert "training on CPU" in said[-1]
    assert "LoRA" in said[-1]
    assert not any("could not be found out" in line for line in said)


def test_missing_packages_are_said_plainly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    version, find_spec = metadata.version, util.find_spec

    def no_peft(name: str) -> str:
        if name in ("peft", "gguf"):
            raise metadata.PackageNotFoundError(name)
        return "4.9" if name == "transformers" else version(name)

    monkeypatch.setattr(metadata, "version", no_peft)
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    main(["doctor"])
    said = lines(capsys)
    assert "  peft          not installed" in said
    assert "  peft          not installed, and needed: pip install 'peft>=0.21'" in said
    assert "  transformers  4.9 is too old: pip install 'transformers>=5.24'" in said
    assert "  gguf          needed for models that come as a GGUF file: pip install gguf" in said
    assert "GGUF" not in said[-1]


def test_without_torch_it_still_answers() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # makes `import torch` fail as if it were not there
        "from twofold.cli import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 1
    said = done.stdout.splitlines()
    assert "  gpu           unknown without torch" in said
    assert any(line.startswith("  torch         is installed and cannot be imported: ") for line in said)
    assert said[-1] == "ready for: nothing yet: see what is missing above"


def test_a_fact_that_cannot_be_had_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise PermissionError("no /proc here")

    monkeypatch.setattr(doctor, "memory", fail)
    assert main(["doctor"]) == 0
    said = lines(capsys)
    assert "  ?             could not be found out: PermissionError: no /proc here" in said
    assert said[-1].startswith("ready for: training on CPU")
