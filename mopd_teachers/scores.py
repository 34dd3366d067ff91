"""What is asked of a teacher and what comes back, with every check that a score must pass.

A sample either gets exactly one finite logprob for each of its response ids, or a
`TeacherFailure` that says why; nothing is padded, cut or filled in.

Legend: P prompt ids, R response ids, K candidates a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mopd_teachers import wire

_ROUNDING = 1e-4  # nats above 0 that a logprob may have by rounding
_VLLM_MINUS_INF = -9999.0  # what vLLM's JSON says for -inf
_AGREE = 1e-3  # nats between two logprobs of one token in one answer


@dataclass(frozen=True, slots=True, eq=False)
class ScoreItem:
    """One sample to score: logprobs of `response_ids` given `prompt_ids` and what precedes."""

    sample_id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    candidate_ids: np.ndarray | None = None
    """[R, K] int32: further ids to score at each response position (the student's top-k)."""


def size_of(item: ScoreItem) -> int:
    """Tokens of a sample."""
    return len(item.prompt_ids) + len(item.response_ids)


@dataclass(frozen=True, slots=True, eq=False)
class TeacherScore:
    """One sample's scores, in nats."""

    logprobs: np.ndarray
    """[R] float32: log T of each response id."""
    topk_ids: np.ndarray | None = None
    """[R, K] int32: the teacher's likeliest ids, likeliest first, or the item's candidates."""
    topk_logprobs: np.ndarray | None = None
    """[R, K] float32: log T of `topk_ids`."""
    cached_tokens: int = 0
    """Of the prompt, that the server had in its prefix cache."""


@dataclass(frozen=True, slots=True)
class TeacherFailure:
    """Why one sample has no score. `cause` is short, for counting; `detail` is for reading."""

    cause: str
    detail: str


Outcome = TeacherScore | TeacherFailure


class _Bad(Exception):
    """`cause` and `detail` of a failure."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


def score_of_result(item: ScoreItem, result: wire.Result, top_k: int) -> Outcome:
    """The score in one result of `/mopd/score`, checked."""
    try:
        if result.error:
            raise _Bad("refused", result.error)
        length, width = len(item.response_ids), _width(item, top_k)
        try:
            ids = wire.bytes_to_ids(result.token_ids, -1)
            logprobs = wire.bytes_to_floats(result.logprobs, -1)
            topk = None
            if width:
                topk = (
                    wire.bytes_to_ids(result.topk_ids, length, width),
                    wire.bytes_to_floats(result.topk_logprobs, length, width),
                )
        except ValueError as error:
            raise _Bad("bad scores", f"arrays of other sizes than asked for: {error}") from error
        return replace(_checked(item, ids, logprobs, topk), cached_tokens=result.cached)
    except _Bad as bad:
        return TeacherFailure(bad.cause, f"sample {item.sample_id}: {bad}")


def score_of_positions(item: ScoreItem, positions: Any, top_k: int) -> Outcome:
    """The score in the `prompt_logprobs` of a plain vLLM server, checked.

    One entry a position: null for the first token, which nothing predicts, else
    ``{"ID": {"logprob": x, "rank": r}, ...}`` with the token that is there and the `top_k`
    likeliest, so that the response starts at entry P.
    """
    try:
        total = len(item.prompt_ids) + len(item.response_ids)
        if not isinstance(positions, list) or len(positions) != total or positions[0] is not None:
            got = f"{len(positions)} entries" if isinstance(positions, list) else "none"
            raise _Bad("bad scores", f"prompt_logprobs has {got}; expected {total}, the first null")
        own, top_ids, top_values = [], [], []
        wanted = zip(item.response_ids, positions[len(item.prompt_ids) :], strict=True)
        for at, (token_id, entry) in enumerate(wanted):
            if not isinstance(entry, Mapping):
                raise _Bad("bad scores", f"no scores at response position {at}")
            found = entry.get(str(token_id))
            if found is None:
                raise _Bad("wrong ids", f"id {token_id} was not scored at response position {at}")
            own.append(_number(found, at))
            if top_k:
                ranked = _ranked(entry, at)[:top_k]
                if [rank for rank, _, _ in ranked] != list(range(1, top_k + 1)):
                    raise _Bad(
                        "bad scores", f"ranks 1 to {top_k} are not all at response position {at}"
                    )
                top_ids.append([token for _, token, _ in ranked])
                top_values.append([value for _, _, value in ranked])
        topk = (np.array(top_ids, np.int32), np.array(top_values, np.float32)) if top_k else None
        ids = np.asarray(item.response_ids, np.int32)
        return _checked(item, ids, np.array(own, np.float32), topk)
    except _Bad as bad:
        return TeacherFailure(bad.cause, f"sample {item.sample_id}: {bad}")


def _number(found: Any, at: int) -> float:
    value = found.get("logprob") if isinstance(found, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _Bad("bad scores", f"logprob {value!r} at response position {at}")
    # vLLM's JSON says -9999 for -inf.
    return -np.inf if value <= _VLLM_MINUS_INF else float(value)


def _ranked(entry: Mapping[str, Any], at: int) -> list[tuple[int, int, float]]:
    """(rank, id, logprob) by rank; the token that is there may have any rank, also past k."""
    try:
        return sorted((int(e["rank"]), int(t), _number(e, at)) for t, e in entry.items())
    except (LookupError, TypeError, ValueError) as error:
        raise _Bad("bad scores", f"unreadable ranks at response position {at}") from error


def _width(item: ScoreItem, top_k: int) -> int:
    return top_k if item.candidate_ids is None else int(item.candidate_ids.shape[1])


def _checked(
    item: ScoreItem,
    ids: np.ndarray,
    logprobs: np.ndarray,
    topk: tuple[np.ndarray, np.ndarray] | None,
) -> TeacherScore:
    """`TeacherScore` of arrays that are what they must be; raises `_Bad` otherwise."""
    sent = np.asarray(item.response_ids, np.int32)
    if len(logprobs) != len(sent) or len(ids) != len(sent):
        raise _Bad(
            "bad scores", f"{len(logprobs)} logprobs and {len(ids)} ids for {len(sent)} ids sent"
        )
    if (wrong := np.flatnonzero(ids != sent)).size:
        at = int(wrong[0])
        raise _Bad(
            "wrong ids", f"id {ids[at]} scored at response position {at}; expected {sent[at]}"
        )
    _require_logprobs(logprobs, "logprob")
    clean = np.minimum(logprobs, 0.0, dtype=np.float32)
    if topk is None:
        return TeacherScore(clean)
    top_ids, top_values = topk
    _require_logprobs(top_values, "top-k logprob")
    if item.candidate_ids is not None:
        if not np.array_equal(top_ids, item.candidate_ids):
            raise _Bad("wrong ids", "the candidates came back as other ids than were sent")
    else:
        _require_top(top_ids, top_values, clean)
    # The sampled token is often one of them: then its two logprobs must be the same number.
    apart = np.where(top_ids == sent[:, None], np.abs(top_values - clean[:, None]), 0.0)
    if apart.size and apart.max() > _AGREE:
        at = int(apart.max(axis=1).argmax())
        raise _Bad(
            "bad scores",
            f"two logprobs, {apart.max():.3g} nats apart, of id {sent[at]} at response position "
            f"{at}",
        )
    return TeacherScore(clean, top_ids, np.minimum(top_values, 0.0, dtype=np.float32))


def _require_logprobs(values: np.ndarray, what: str) -> None:
    # NaN and the infinities fail the comparison, too.
    bad = ~((values > _VLLM_MINUS_INF) & (values <= _ROUNDING))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise _Bad(
            "bad scores",
            f"{what} {float(values[at])!r} at response position {at[0]}; expected a finite number "
            "that is at most 0",
        )


def _require_top(ids: np.ndarray, values: np.ndarray, own: np.ndarray) -> None:
    """The likeliest K: each once, likeliest first, and no sampled token likelier than them all."""
    if ids.min() < 0 or (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
        raise _Bad("bad scores", "a top-k id is negative or named twice at one position")
    if (np.diff(values, axis=1) > 0).any():
        raise _Bad("bad scores", "the top-k logprobs are not in order")
    if (own > values[:, 0] + _AGREE).any():
        raise _Bad("bad scores", "a sampled token is likelier than the likeliest of the top-k")
