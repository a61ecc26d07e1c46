"""The examples that no other test runs: what they say is true."""

import sys
from pathlib import Path

import pytest
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


def test_plans_of_ones_own(tmp_path: Path) -> None:
    """The same loss on every layout, and one that has been learned (it starts near 1.5)."""
    from own_plans import ranks, train

    expected = train("fsdp:1", str(tmp_path))
    assert expected < 0.5
    for strategy in ("tp:2", "pp:2,zbv", "pp:2,tp:2"):
        for loss in run_ranks(ranks(strategy), train, strategy, str(tmp_path)):
            assert loss == pytest.approx(expected, rel=1e-5), strategy
