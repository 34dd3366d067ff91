"""The rows that sequences become, and samples that are refused."""

from __future__ import annotations

import torch
from student_tiny import make_samples

from mopd.student.batching import build_packed_row, build_rows, pad_responses, refusals

CPU = torch.device("cpu")


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


def test_packed_sequences_lie_end_to_end() -> None:
    sequences = [((5, 6, 7), (8, 9)), None, ((4,), (3,))]
    rows = build_packed_row(sequences, length=6, pad_id=0, device=CPU)
    assert rows.input_ids_BS.tolist() == [[5, 6, 7, 8, 4, 0]]
    assert rows.position_ids_BS.tolist() == [[0, 1, 2, 3, 0, 0]]
    assert rows.segments == (4, 1, 1)  # the last is padding
    assert rows.row_N.tolist() == [0, 0, 0] and rows.position_N.tolist() == [2, 3, 4]
    assert rows.target_N.tolist() == [8, 9, 3]
    spread = rows.spread(torch.tensor([1.0, 2.0, 3.0]))
    assert spread.tolist() == [[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]]
    assert build_packed_row([None], length=2, pad_id=3, device=CPU).segments == (2,)


def test_padding_of_scores_is_masked() -> None:
    values, mask = pad_responses([[1.5], None, [2.5, 3.5]], width=2, device=CPU)
    assert values.tolist() == [[1.5, 0.0], [0.0, 0.0], [2.5, 3.5]]
    assert mask.tolist() == [[True, False], [False, False], [True, True]]


def test_an_id_twice_in_a_step_is_refused() -> None:
    (sample,) = make_samples(1)
    reasons = refusals([sample, sample], valid_vocab=61, max_positions=128, domains=["a", "b"])
    assert reasons == {sample.sample_id: "its id occurs twice in the step"}


def test_longer_than_the_token_budget_is_refused() -> None:
    (sample,) = make_samples(1)
    size = len(sample.prompt_ids) + len(sample.response_ids) - 1
    ask = dict(valid_vocab=61, max_positions=128, domains=["a"])
    assert refusals([sample], **ask, max_tokens=size) == {}
    (reason,) = refusals([sample], **ask, max_tokens=size - 1).values()
    assert reason == f"{size} input tokens; student.max_tokens_per_microbatch is {size - 1}"
