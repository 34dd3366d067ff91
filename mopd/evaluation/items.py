"""One model's answer to one held-out item, and what can be seen of it beside right or wrong."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mopd.types import Prompt, Rollout, Verdict

Role = Literal["base", "teacher", "student"]
Measure = Literal["correct", "score"]

ROLES: tuple[Role, ...] = ("base", "teacher", "student")
NGRAM = 4


@dataclass(frozen=True, slots=True)
class ItemResult:
    """E.g. ``ItemResult("math/7", True, 1.0, 12, "stop")``: right, in twelve tokens.

    The fields with a default are None in records made before they were kept.
    """

    item_id: str
    correct: bool | None
    """Exact match; None where it could not be judged (no verifier, or the verifier failed)."""
    score: float | None
    """Partial credit in [0, 1]; None exactly where ``correct`` is."""
    response_tokens: int
    finish_reason: str
    """``stop``, ``length`` (cut off at the response limit) or ``abort``."""
    response: str | None = None
    """The answer's text, special tokens left out."""
    repetition: float | None = None
    """Share of the answer's 4-grams that occurred before in it (`repetition`)."""
    format_error: bool | None = None
    """Empty or cut off: there is no whole answer to judge."""
    lenient: bool | None = None
    """Right, or the reference stands somewhere in the answer (`holds_reference`)."""
    response_ids: Sequence[int] | None = None
    """[R] ids as they were generated, the end-of-sequence id included."""


Answers = dict[str, list[ItemResult]]
"""set (or domain) -> one result per held-out item."""

Results = Mapping[str, Mapping[str, Sequence[ItemResult]]]
"""role -> set -> the role's answers to that set's items."""


def item_result(
    prompt: Prompt, rollout: Rollout, verdict: Verdict | None, text: str | None
) -> ItemResult:
    """What is kept of one answer; `verdict` None: it was not judged, `text` None: not decoded."""
    correct = None if verdict is None else verdict.correct
    finish_reason: str = rollout.finish_reason
    if text is not None:
        text, finish_reason = answer_text(prompt, text, finish_reason)
    return ItemResult(
        item_id=prompt.id,
        correct=correct,
        score=None if verdict is None else verdict.score,
        response_tokens=len(rollout.response_ids),
        finish_reason=finish_reason,
        response=text,
        **seen_in_answer(text, rollout.response_ids, finish_reason, correct, prompt.answer),
        response_ids=list(rollout.response_ids),
    )


def answer_text(prompt: Prompt, text: str, finish_reason: str) -> tuple[str, str]:
    """(text, finish_reason) of the answer as far as it counts: one that reached a text at which the
    prompt's answers end has ended there."""
    text, ended = prompt.ended(text)
    return text, "stop" if ended else finish_reason


def repetition(tokens: Sequence[object]) -> float:
    """Share of 4-grams that are repeats of an earlier one: 0 for none, near 1 for a loop."""
    count = len(tokens) - NGRAM + 1
    if count <= 1:
        return 0.0
    different = len({tuple(tokens[k : k + NGRAM]) for k in range(count)})
    return 1.0 - different / count


def holds_reference(response: str, reference: str | None) -> bool:
    """Whether the reference stands in the answer as words of its own, whatever is around it.

    What a strict verifier calls wrong for its dress alone ("The answer is 42." for "42") counts
    here. Case and the width of blanks do not matter.
    """
    if reference is None or not (wanted := plain_text(reference)):
        return False
    return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", plain_text(response)) is not None


def plain_text(text: str) -> str:
    """Text by which two prompts (or answers) are the same: NFKC, case folded, blanks joined."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def seen_in_answer(
    response: str | None,
    tokens: Sequence[object] | None,
    finish_reason: str,
    correct: bool | None,
    reference: str | None,
) -> dict[str, Any]:
    """The fields ``repetition``, ``format_error`` and ``lenient`` of an `ItemResult`.

    Args:
        tokens: [R] ids; None where only the text is known (its words are counted then).
    """
    if response is None:
        return {"repetition": None, "format_error": None, "lenient": None}
    lenient = None
    if correct is not None and reference is not None:
        lenient = correct or holds_reference(response, reference)
    return {
        "repetition": repetition(response.split() if tokens is None else tokens),
        "format_error": finish_reason != "stop" or not response.strip(),
        "lenient": lenient,
    }
