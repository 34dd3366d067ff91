"""Dealing sequences to ranks and forwards."""

from __future__ import annotations

import random

import pytest

from mopd.config.schema import ParallelConfig, StudentConfig
from mopd.student.planning import MicrobatchPlan, plan, plan_by_count, plan_by_tokens


def check(
    plans: list[MicrobatchPlan], lengths: list[int], dp: int, multiple_of: int, packed: bool
) -> None:
    """Every sequence once; as many forwards on every rank; rows that hold what they should."""
    dealt = [i for p in plans for rank in p.rows for i in rank if i is not None]
    assert sorted(dealt) == list(range(len(lengths)))
    for p in plans:
        assert len(p.rows) == len(p.lengths) == dp
        for rank, size in zip(p.rows, p.lengths, strict=True):
            own = [lengths[i] for i in rank if i is not None]
            needed = (sum if packed else max)(own or [1])
            assert rank and needed <= size and size % multiple_of == 0
            if packed:
                assert size < needed + multiple_of


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 8, 64])
@pytest.mark.parametrize("count", [0, 1, 5, 8, 23])
@pytest.mark.parametrize("multiple_of", [1, 2])
def test_by_count(dp: int, size: int, count: int, multiple_of: int) -> None:
    lengths = [random.Random(count).randint(1, 40) for _ in range(count)]
    plans = plan_by_count(lengths, dp, size, multiple_of)
    check(plans, lengths, dp, multiple_of, packed=False)
    for p in plans:
        assert len(set(p.lengths)) == 1 and len({len(rank) for rank in p.rows}) == 1
        assert 1 <= len(p.rows[0]) <= size
        chosen = [lengths[i] for rank in p.rows for i in rank if i is not None]
        assert p.lengths[0] < max(chosen) + multiple_of
    # No more forwards than the memory limit asks for, and fewer rows of padding than ranks in each.
    assert len(plans) == -(-count // (dp * size))
    padding = sum(i is None for p in plans for rank in p.rows for i in rank)
    assert padding <= len(plans) * (dp - 1)


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("budget", [40, 64, 1000])
@pytest.mark.parametrize("count", [0, 1, 5, 23])
@pytest.mark.parametrize("multiple_of", [1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_by_tokens(dp: int, budget: int, count: int, multiple_of: int, packed: bool) -> None:
    lengths = [random.Random(i).randint(1, 40) for i in range(count)]
    plans = plan_by_tokens(lengths, dp, budget, multiple_of, packed=packed)
    check(plans, lengths, dp, multiple_of, packed)
    for p in plans:
        for rank, size in zip(p.rows, p.lengths, strict=True):
            assert size * (1 if packed else len(rank)) <= budget
    if count >= dp:  # then no rank has a forward of padding alone
        assert all(rank != (None,) for p in plans for rank in p.rows)


def test_neighbours_in_length_go_together() -> None:
    plans = plan_by_count([1, 30, 2, 29, 3, 28, 4, 27], dp=2, micro_batch_size=2)
    assert [p.lengths for p in plans] == [(30, 30), (4, 4)]
    assert plans[0].rows == ((1, 5), (3, 7))


def test_a_budget_gives_every_rank_the_same_number_of_forwards() -> None:
    """C23: budget 100, five sequences of 95 and five of 20."""
    plans = plan_by_tokens([95] * 5 + [20] * 5, 2, 100, packed=True)
    assert [p.lengths for p in plans] == [(95, 95), (95, 95), (95, 100)]
    assert plan_by_tokens([95] * 5 + [20] * 5, 2, 100, packed=False) == plans[:2] + [
        MicrobatchPlan((95, 20), ((4,), (5, 6, 7, 8, 9)))
    ]


def test_forwards_are_as_even_as_they_can_be() -> None:
    plans = plan_by_tokens([10] * 12, 1, 100, packed=True)
    assert [p.lengths for p in plans] == [(60,), (60,)]  # not 100 and 20


def test_what_the_configuration_asks_for() -> None:
    lengths = [7, 5, 3, 3, 2]

    def of(**config: object) -> list[MicrobatchPlan]:
        layout = ParallelConfig(tp=2)
        return plan(lengths, 1, StudentConfig(model="x", parallel=layout, **config))  # type: ignore[arg-type]

    assert [(p.lengths, p.rows) for p in of(micro_batch_size=3)] == [
        ((8,), ((0, 1, 2),)),
        ((4,), ((3, 4),)),
    ]
    assert [p.lengths for p in of(micro_batch_size=3, packing=True)] == [(16,), (6,)]
    assert [p.lengths for p in of(max_tokens_per_microbatch=16)] == [(8,), (4,)]
    packed = of(max_tokens_per_microbatch=20, packing=True)
    assert [(p.lengths, p.rows) for p in packed] == [((20,), ((0, 1, 2, 3, 4),))]
