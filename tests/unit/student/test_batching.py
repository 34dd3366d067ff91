"""Dealing sequences to micro-batches and ranks, and the rows they become."""

from __future__ import annotations

import random

import pytest
import torch
from student_tiny import make_samples

from mopd.student.batching import build_rows, pad_responses, plan_microbatches, refusals

CPU = torch.device("cpu")


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 8, 64])
@pytest.mark.parametrize("count", [0, 1, 5, 8, 23])
@pytest.mark.parametrize("multiple_of", [1, 2])
def test_every_sequence_once_in_equal_shapes(
    dp: int, size: int, count: int, multiple_of: int
) -> None:
    lengths = [random.Random(count).randint(1, 40) for _ in range(count)]
    plans = plan_microbatches(lengths, dp, size, multiple_of)
    dealt = [i for plan in plans for rank in plan.rows for i in rank if i is not None]
    assert sorted(dealt) == list(range(count))
    for plan in plans:
        assert len(plan.rows) == dp
        assert len({len(rank) for rank in plan.rows}) == 1
        assert 1 <= len(plan.rows[0]) <= size
        chosen = [lengths[i] for rank in plan.rows for i in rank if i is not None]
        assert max(chosen) <= plan.length < max(chosen) + multiple_of
        assert plan.length % multiple_of == 0
    # No more forwards than the memory limit asks for, and fewer rows of padding than ranks in each.
    assert len(plans) == -(-count // (dp * size))
    padding = sum(i is None for plan in plans for rank in plan.rows for i in rank)
    assert padding <= len(plans) * (dp - 1)


def test_neighbours_in_length_go_together() -> None:
    plans = plan_microbatches([1, 30, 2, 29, 3, 28, 4, 27], dp=2, micro_batch_size=2)
    assert [plan.length for plan in plans] == [30, 4]
    assert plans[0].rows == ((1, 5), (3, 7))


def test_unequal_loads_give_every_rank_the_same_forwards() -> None:
    """C23's kind: long and short sequences; no rank waits for one that has no turn."""
    plans = plan_microbatches([95] * 5 + [20] * 5, dp=2, micro_batch_size=1)
    assert len(plans) == 5
    assert all(len(rank) == 1 for plan in plans for rank in plan.rows)


def test_rows_predict_each_response_token_from_the_position_before_it() -> None:
    rows = build_rows([((5, 6, 7), (8, 9)), None, ((4,), (3,))], length=6, pad_id=0, device=CPU)
    assert rows.input_ids_BS.tolist() == [
        [5, 6, 7, 8, 0, 0],  # 9 is only predicted
        [0, 0, 0, 0, 0, 0],
        [4, 0, 0, 0, 0, 0],
    ]
    assert rows.position_ids_BS[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert list(zip(rows.row_N.tolist(), rows.position_N.tolist(), strict=True)) == [
        (0, 2),
        (0, 3),
        (2, 0),
    ]
    assert rows.target_N.tolist() == [8, 9, 3]
    spread = rows.spread(torch.tensor([1.0, 2.0, 3.0]))
    assert spread.tolist() == [[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]]


def test_rows_of_padding_alone() -> None:
    rows = build_rows([None, None], length=4, pad_id=3, device=CPU)
    assert rows.input_ids_BS.tolist() == [[3] * 4] * 2
    values = torch.zeros(0, requires_grad=True)
    spread = rows.spread(values)
    assert spread.shape == (2, 0) and spread.requires_grad


def test_padding_of_scores_is_masked() -> None:
    values, mask = pad_responses([[1.5], None, [2.5, 3.5]], width=2, device=CPU)
    assert values.tolist() == [[1.5, 0.0], [0.0, 0.0], [2.5, 3.5]]
    assert mask.tolist() == [[True, False], [False, False], [True, True]]


def test_an_id_twice_in_a_step_is_refused() -> None:
    (sample,) = make_samples(1)
    reasons = refusals([sample, sample], valid_vocab=61, max_positions=128, domains=["a", "b"])
    assert reasons == {sample.sample_id: "its id occurs twice in the step"}
