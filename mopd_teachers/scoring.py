"""Scores of one batch from one server, by the route that it has."""

from __future__ import annotations

from collections.abc import Sequence

from mopd_teachers import wire
from mopd_teachers.replica import UNKNOWN, Replica
from mopd_teachers.scores import Outcome, ScoreItem, score_of_positions, score_of_result
from mopd_teachers.transport import Ask, RequestError

RESTARTED = "restarted"
"""Cause of an answer by another process than the one that was probed."""


_MOST_FINGERPRINTS = 8
"""A server that says ever other ones says nothing by them."""


async def score_at(
    ask: Ask, server: Replica, chunk: Sequence[ScoreItem], top_k: int, *, probing: bool = False
) -> dict[str, Outcome]:
    """Every sample's outcome from this server; `RequestError` when a request fails as a whole, with
    the cause `RESTARTED` when it must be probed first; not so while it is (`probing`)."""
    if server.instance == UNKNOWN:
        raise RequestError(RESTARTED, f"{server.url} was another model", True)
    try:
        if server.fast:
            return await _score_fast(ask, server, chunk, top_k)
        return {i.sample_id: await _score_stock(ask, server, i, top_k, probing) for i in chunk}
    except RequestError as error:
        if error.cause == "http 404":  # both routes say so of a model that they do not serve
            raise RequestError("stranger", error.detail, retry=True) from error
        raise


async def _score_fast(
    ask: Ask, server: Replica, chunk: Sequence[ScoreItem], top_k: int
) -> dict[str, Outcome]:
    assert server.model is not None
    body = wire.encode(
        wire.ScoreRequest(
            wire.PROTOCOL,
            server.model,
            [
                wire.SequenceMsg(
                    item.sample_id,
                    wire.ids_to_bytes(item.prompt_ids),
                    wire.ids_to_bytes(item.response_ids),
                    b"" if item.candidate_ids is None else wire.ids_to_bytes(item.candidate_ids),
                )
                for item in chunk
            ],
            top_k,
        )
    )
    content = await ask(
        server, "POST", wire.PATH, body, binary=True, content_type=wire.CONTENT_TYPE
    )
    try:
        reply = wire.decode_reply(content)
    except wire.WireError as error:
        raise RequestError(
            "bad answer", f"{server.url}{wire.PATH} answered other than scores: {error}", True
        ) from error
    if reply.protocol != wire.PROTOCOL or reply.model != server.model:
        raise RequestError(
            "stranger",
            f"{server.url} answered as {reply.model!r} by protocol {reply.protocol}; expected "
            f"{server.model!r} and {wire.PROTOCOL}",
            True,
        )
    if server.instance is not None and reply.instance != server.instance:
        raise RequestError(RESTARTED, f"{server.url} was restarted", True)
    results = {result.id: result for result in reply.results}
    if len(results) != len(reply.results) or results.keys() != {i.sample_id for i in chunk}:
        raise RequestError(
            "bad answer",
            f"{server.url} returned {len(reply.results)} results for {len(results)} ids; "
            f"expected one for each of the {len(chunk)} sequences sent",
            True,
        )
    return {i.sample_id: score_of_result(i, results[i.sample_id], top_k) for i in chunk}


async def _score_stock(
    ask: Ask, server: Replica, item: ScoreItem, top_k: int, probing: bool
) -> Outcome:
    body = {
        "model": server.model,
        "prompt": [*item.prompt_ids, *item.response_ids],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": top_k,
    }
    answer = await ask(server, "POST", "/v1/completions", body)
    # vLLM's hash of its configuration: the checkpoint's path, above all.
    said = answer.get("system_fingerprint") if isinstance(answer, dict) else None
    if isinstance(said, str) and said not in server.fingerprints:
        server.unmet.add(said)
        if not probing and len(server.fingerprints) < _MOST_FINGERPRINTS:
            server.went_away()
            raise RequestError(
                RESTARTED, f"{server.url} answers as {said}, another than it was", True
            )
    try:
        positions = answer["choices"][0]["prompt_logprobs"]
    except (TypeError, LookupError):
        positions = None
    return score_of_positions(item, positions, top_k)
