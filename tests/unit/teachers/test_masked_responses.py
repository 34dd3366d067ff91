"""C04: a response with a tool's output between two turns, mask 0 1 1 0 0 1.

There is no mask here: a teacher scores every response id, or the sample has no score. What must not
be is a score for three of six positions that is taken for the first three, or moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mopd_teachers import wire
from mopd_teachers.scores import (
    Outcome,
    ScoreItem,
    TeacherFailure,
    TeacherScore,
    score_of_positions,
    score_of_result,
)

PROMPT, RESPONSE = (7, 8), (10, 11, 12, 13, 14, 15)
MASK = (0, 1, 1, 0, 0, 1)
LIVE = [i for i, live in enumerate(MASK) if live]
LOGPROBS = [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]
ITEM = ScoreItem("s", PROMPT, RESPONSE)


def by_batch(positions: list[int], ids: list[int] | None = None) -> Outcome:
    """The batch route's answer of these response positions."""
    return score_of_result(
        ITEM,
        wire.Result(
            "s",
            wire.ids_to_bytes([RESPONSE[i] for i in positions] if ids is None else ids),
            wire.floats_to_bytes([LOGPROBS[i] for i in positions]),
        ),
        0,
    )


def by_completion(positions: list[int], *, null: bool) -> Outcome:
    """A plain vLLM server's, with nothing at the other positions, or without them."""
    entries: list[Any] = [None, {"8": {"logprob": -1.0, "rank": 1}}]
    for i, token in enumerate(RESPONSE):
        if i in positions:
            entries.append({str(token): {"logprob": LOGPROBS[i], "rank": 1}})
        elif null:
            entries.append(None)
    return score_of_positions(ITEM, entries, 0)


def test_every_position_has_its_own_score() -> None:
    whole = list(range(len(RESPONSE)))
    for outcome in (by_batch(whole), by_completion(whole, null=True)):
        assert isinstance(outcome, TeacherScore)
        assert outcome.logprobs == pytest.approx(np.array(LOGPROBS, np.float32))


@pytest.mark.parametrize(
    ("outcome", "cause", "says"),
    [
        (by_batch(LIVE), "bad scores", "3 logprobs and 3 ids for 6 ids sent"),
        # The right number of values, moved to the front, the rest filled up.
        (
            by_batch([*LIVE, 0, 3, 4]),
            "wrong ids",
            "id 11 scored at response position 0; expected 10",
        ),
        (by_batch(LIVE, list(RESPONSE)), "bad scores", "3 logprobs and 6 ids"),
        (by_completion(LIVE, null=True), "bad scores", "no scores at response position 0"),
        (by_completion(LIVE, null=False), "bad scores", "has 5 entries; expected 8"),
    ],
)
def test_scores_of_the_masked_response_are_refused(outcome: Outcome, cause: str, says: str) -> None:
    assert isinstance(outcome, TeacherFailure)
    assert outcome.cause == cause and says in outcome.detail


def test_a_score_of_another_position_is_refused() -> None:
    entries: list[Any] = [None, {"8": {"logprob": -1.0, "rank": 1}}]
    shifted = (*RESPONSE[1:], RESPONSE[0])
    entries += [{str(t): {"logprob": -0.1, "rank": 1}} for t in shifted]
    outcome = score_of_positions(ITEM, entries, 0)
    assert isinstance(outcome, TeacherFailure) and outcome.cause == "wrong ids"
