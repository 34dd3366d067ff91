"""Is this server the teacher that it should be, and does it know anything?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mopd_teachers import wire
from mopd_teachers.errors import TeacherError
from mopd_teachers.prefixes import PrefixMemory
from mopd_teachers.replica import Replica
from mopd_teachers.scores import ScoreItem, TeacherFailure
from mopd_teachers.scoring import score_at
from mopd_teachers.transport import Ask, RequestError

_PROBE_IDS = tuple((7 * i + 11) % 64 for i in range(48))  # in every vocabulary of 64 or more
_MIN_SPREAD = 0.05  # nats; a model that knows anything varies by whole nats over 47 tokens
_REPEAT = 0.05  # nats between two scores of the same tokens


@dataclass(frozen=True, slots=True)
class Needs:
    """What will be asked of a teacher."""

    top_k: int = 0
    candidates: bool = False


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What `TeacherClient.probe` found."""

    models: tuple[str, ...]
    """Served name of each server."""
    max_model_len: int
    """Shortest of the servers' contexts, in tokens."""
    fast_route: bool
    """True when every server has our route."""
    capabilities: frozenset[str]
    """What every server can score: `wire.SAMPLED`, `wire.TOP_K`, `wire.CANDIDATES`."""


async def probe_server(ask: Ask, server: Replica, teacher: str, needs: Needs) -> np.ndarray:
    """Identify the server, note what it can do, and check its scores, which it returns ([47]
    float32: two servers of one model agree on them).

    Raises:
        TeacherError: it is another model, cannot do what is needed, or knows nothing.
        RequestError: it does not answer.
    """
    described = await _identify(ask, server, teacher)
    _require_able(server, teacher, needs, described)
    return await _check_scores(ask, server, teacher, needs)


async def require_same_model(ask: Ask, server: Replica) -> None:
    """A cheap question: does it answer, and still serve the model that it served?

    Raises RequestError otherwise.
    """
    answer = await ask(server, "GET", "/v1/models")
    if server.model not in _cards(answer):
        raise RequestError(
            "stranger", f"{server.url} serves {sorted(_cards(answer))}, not {server.model!r}", True
        )


def _cards(answer: Any) -> dict[str, Any]:
    try:
        return {card["id"]: card for card in answer["data"]}
    except (TypeError, LookupError):
        return {}


async def _identify(ask: Ask, server: Replica, teacher: str) -> Mapping[str, Any]:
    """Check the served name; note the context length and whether our route is there. Returns
    what our route says of itself, or nothing."""
    cards = _cards(await ask(server, "GET", "/v1/models"))
    if not cards:
        raise TeacherError(
            f"teacher {teacher!r}: {server.url}/v1/models lists no model; expected a vLLM server"
        )
    model = next(iter(cards)) if server.model is None else server.model
    if model not in cards:
        raise TeacherError(
            f"teacher {teacher!r}: {server.url} serves {sorted(cards)}, expected {model!r}. "
            "Another server answers there, or `model` is wrong"
        )
    length = cards[model].get("max_model_len")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise TeacherError(
            f"teacher {teacher!r}: {server.url} does not say its max_model_len (got {length!r}); "
            "expected a vLLM server"
        )
    described: Any = None
    try:
        described = await ask(server, "GET", wire.PATH)
    except RequestError as error:
        if error.cause not in ("http 404", "http 405"):
            raise
    if not _speaks_ours(described):
        described = {}
    server.model, server.max_model_len, server.fast = model, length, bool(described)
    server.instance = described.get("instance")
    block, tokens = described.get("prefix_block", 0), described.get("prefix_tokens", 0)
    server.prefixes = PrefixMemory(block, tokens) if block else None
    server.capabilities = frozenset(
        described["capabilities"] if described else (wire.SAMPLED, wire.TOP_K)
    )
    return described


def _speaks_ours(described: Any) -> bool:
    """Whether this is what our route says of itself, and not another program's answer there."""
    if not isinstance(described, Mapping) or described.get("protocol") != wire.PROTOCOL:
        return False
    able, most = described.get("capabilities"), described.get("max_top_k")
    return (
        isinstance(able, list)
        and all(isinstance(each, str) for each in able)
        and isinstance(most, int | None)
        and isinstance(described.get("instance"), str | None)
        and all(_is_count(described.get(key, 0)) for key in ("prefix_block", "prefix_tokens"))
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require_able(
    server: Replica, teacher: str, needs: Needs, described: Mapping[str, Any]
) -> None:
    """Refuse a server that cannot give what the run will ask for."""
    if needs.candidates and wire.CANDIDATES not in server.capabilities:
        raise TeacherError(
            f"teacher {teacher!r}: {server.url} is a vLLM server without the route {wire.PATH} "
            f"(protocol {wire.PROTOCOL}), so it cannot score ids that it is given (the student's "
            "top-k). Let the teacher's own top-k be the support, or serve the teacher by "
            "`mopd teachers serve`"
        )
    limit = described.get("max_top_k")
    if limit is not None and needs.top_k > limit:
        raise TeacherError(
            f"teacher {teacher!r}: {server.url} gives at most the {limit} likeliest ids, expected "
            f"{needs.top_k}; lower top_k"
        )


async def _check_scores(ask: Ask, server: Replica, teacher: str, needs: Needs) -> np.ndarray:
    response = _PROBE_IDS[1:]
    # Also its own candidate, whose two logprobs `scores` compares.
    given = np.array([(i, (i + 1) % 64) for i in response]) if needs.candidates else None
    item = ScoreItem("probe", _PROBE_IDS[:1], response, given)
    top_k = 0 if needs.candidates else needs.top_k
    found: list[np.ndarray] = []
    for _ in range(2):
        try:
            score = (await score_at(ask, server, [item], top_k, probing=True))["probe"]
        except RequestError as error:
            if error.cause == "http 400" and top_k:
                raise TeacherError(
                    f"teacher {teacher!r}: {server.url} refused to give the {top_k} likeliest "
                    "ids; a plain vLLM server gives as many as its --max-logprobs says (20 by "
                    f"default): {error.detail}"
                ) from error
            raise
        if isinstance(score, TeacherFailure):
            raise TeacherError(
                f"teacher {teacher!r}: {server.url} cannot score a probe of {len(_PROBE_IDS)} "
                f"tokens: {score.detail}"
            )
        found.append(score.logprobs)
    apart = float(np.abs(found[0] - found[1]).max())
    if apart > _REPEAT:
        raise TeacherError(
            f"teacher {teacher!r}: {server.url} scored the same tokens twice and the logprobs "
            f"differ by up to {apart:.3g} nats; expected the same. Is a sampling parameter or a "
            "changing adapter active there?"
        )
    if float(np.ptp(found[0])) < _MIN_SPREAD:
        mean = float(found[0].mean())
        raise TeacherError(
            f"teacher {teacher!r}: {server.url} gives every token the same logprob ({mean:.3f}, "
            f"that is 1 of {math.exp(-mean):.0f}): the model has lost its weights, or never had "
            "any. Restart the server from a good checkpoint"
        )
    return found[0]
