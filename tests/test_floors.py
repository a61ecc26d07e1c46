"""The house: a file imports from its own floor or below; importing the package is quick and brings no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import twofold

ROOT = Path(twofold.__file__).parent
FLOORS = {
    **dict.fromkeys(["ops", "config", "task", "errors"], 0),
    **dict.fromkeys(["data", "mesh", "monitor"], 1),
    **dict.fromkeys(["models", "parallel"], 2),
    **dict.fromkeys(["engine", "planner"], 3),
    **dict.fromkeys(["methods", "trainer"], 4),
    **dict.fromkeys(["cli", "board", "__main__"], 5),
}
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("twofold.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_from_its_own_floor_or_below(path: Path) -> None:
    here = FLOORS[room(path.relative_to(ROOT).parts)]
    for name in imports(path):
        there = FLOORS.get(name.split(".")[1])
        assert there is None or there <= here, f"{path.name} on floor {here} imports {name} from floor {there}"


def test_the_seam() -> None:
    """A task never sees torch.distributed; the engine never sees transformers nor a method."""
    words = {"engine": ("transformers", "peft", "twofold.methods"), "methods": ("torch.distributed",)}
    for folder, forbidden in words.items():
        for path in (ROOT / folder).rglob("*.py"):
            names = {
                alias.name if isinstance(node, ast.Import) else f"{node.module}"
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            }
            assert not [n for n in names if n.startswith(forbidden)], path


def test_files_are_of_a_size_to_read() -> None:
    assert not [p for p in FILES if len(p.read_text().splitlines()) > 400]


def test_import_is_quick_and_brings_no_torch() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import twofold; s = time.perf_counter() - t; "
        "print(s, [m for m in ('torch', 'transformers', 'pydantic', 'numpy') if m in sys.modules])"
    )
    done = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert all(d.stdout.split(maxsplit=1)[1] == "[]\n" for d in done)
    assert min(float(d.stdout.split()[0]) for d in done) < 0.1


def test_every_public_name_is_there() -> None:
    for name in twofold.__all__:
        assert getattr(twofold, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nope'"):
        _ = twofold.Nope
