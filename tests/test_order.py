"""Law 4: which samples make a step, whatever the ranks; and how a step is shared and cut."""

import random
from collections import Counter

import pytest

from twofold.data.order import Cut, Order, evaluation_batches, micro_batches


@pytest.mark.parametrize(("n", "batch"), [(10, 3), (12, 4), (5, 8), (1, 1)])
def test_every_epoch_holds_every_sample_once(n: int, batch: int) -> None:
    order = Order(n, batch, seed=1)
    for epoch in range(3):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        seen = [s for k in steps for s in order.step(k)]
        assert sorted(seen) == list(range(n))
        assert [len(order.step(k)) for k in steps][:-1] == [batch] * (len(steps) - 1)


def test_a_step_is_a_function_of_its_number() -> None:
    order = Order(100, 7, seed=3)
    forwards = [order.step(k) for k in range(40)]
    backwards = [Order(100, 7, seed=3).step(k) for k in reversed(range(40))]
    assert forwards == backwards[::-1]
    assert forwards[:15] != forwards[15:30]  # another epoch, another order
    assert forwards != [Order(100, 7, seed=4).step(k) for k in range(40)]
    assert [s for k in range(15) for s in Order(100, 7, shuffle=False).step(k)] == list(range(100))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("how", [Cut(), Cut(tokens=64), Cut(rows=2), Cut(tokens=64, padded=True), Cut(64, 3)])
@pytest.mark.parametrize("with_costs", [True, False])
def test_a_step_is_shared_without_loss(ranks: int, how: Cut, with_costs: bool) -> None:
    rng = random.Random(0)
    costs = [rng.randint(1, 100) for _ in range(50)]
    samples = rng.sample(range(50), 17)
    plan = micro_batches(samples, costs if with_costs else None, ranks, how)
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1  # no rank waits for another's extra micro-batch
    assert Counter(s for batches in plan for b in batches for s in b) == Counter(samples)
    for batch in (b for batches in plan for b in batches if b):
        assert how.rows is None or len(batch) <= how.rows
        if with_costs and how.tokens is not None and len(batch) > 1:
            lengths = [costs[s] for s in batch]
            assert (max(lengths) * len(lengths) if how.padded else sum(lengths)) <= how.tokens


def test_ranks_get_alike_amounts_of_tokens() -> None:
    rng = random.Random(1)
    costs = [int(rng.lognormvariate(4.5, 0.8)) + 1 for _ in range(64)]
    for ranks in (2, 4):
        plan = micro_batches(range(64), costs, ranks, Cut())
        load = [sum(costs[s] for b in batches for s in b) for batches in plan]
        assert max(load) / min(load) < 1.05  # by position alone it is 1.2 and 1.4 here


def test_a_rank_without_samples_gets_filler() -> None:
    assert micro_batches([4, 2], [1] * 5, 3, Cut()) == [[[2]], [[4]], [[]]]


@pytest.mark.parametrize(("least", "multiple", "expected"), [(1, 1, 2), (2, 2, 2), (3, 1, 3), (4, 2, 4), (8, 4, 8)])
def test_a_pipeline_has_the_micro_batches_it_needs(least: int, multiple: int, expected: int) -> None:
    """Seven samples of ten tokens in micro-batches of forty: the larger ones are halved, filler is the rest."""
    [plan] = micro_batches(range(7), [10] * 7, 1, Cut(tokens=40), least, multiple)
    assert len(plan) == expected
    assert sorted(s for batch in plan for s in batch) == list(range(7))
    assert sum(not batch for batch in plan) == max(0, expected - 7)
    assert max(map(len, plan)) == {2: 4, 3: 3, 4: 2, 8: 1}[expected]


@pytest.mark.parametrize("n", [1, 7, 16])
def test_an_evaluation_has_the_same_batches_on_any_number_of_ranks(n: int) -> None:
    costs = [3 * i % 11 + 1 for i in range(n)]
    found = []
    for ranks in (1, 2, 3):
        plan = evaluation_batches(n, costs, ranks, Cut(tokens=20))
        assert len({len(batches) for batches in plan}) == 1
        found.append(sorted(b for batches in plan for b in batches if b))
    assert found[0] == found[1] == found[2]
    assert sorted(s for b in found[0] for s in b) == list(range(n))
