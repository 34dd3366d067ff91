"""`/mopd/score`: logprobs of given token ids, a whole batch in one request.

GET  /mopd/score -> {"protocol": 1}, for clients to ask whether the route is there.
POST /mopd/score {"sequences": [{"prompt_ids": [P ids], "response_ids": [R ids]}, ...]}
  -> {"results": [{"token_ids": [R ids], "logprobs": [R floats]} | {"error": text}, ...]}

One result per sequence, in their order. `token_ids` are the ids the engine says it scored, for
the client to compare with those it sent. logprobs[t] = log p(response[t] | prompt, response[:t]).
NaN and infinities travel as null. The stock route to the same numbers (`/v1/completions` with
`prompt_logprobs`) builds, detokenises and serialises a dict for every position.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

PROTOCOL = 1


class Sequence(msgspec.Struct):
    prompt_ids: list[int]
    response_ids: list[int]


class ScoreRequest(msgspec.Struct):
    sequences: list[Sequence]


class Scored(msgspec.Struct):
    token_ids: list[int]
    logprobs: list[float]


class Refused(msgspec.Struct):
    error: str


_counter = itertools.count()


async def _submit(engine: Any, sequence: Sequence) -> Any:
    """Hand one sequence to the engine; returns the queue its result will come through."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    if not sequence.prompt_ids or not sequence.response_ids:
        raise ValueError(
            f"prompt of {len(sequence.prompt_ids)} and response of {len(sequence.response_ids)} "
            "tokens: both need at least one"
        )
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    ids = sequence.prompt_ids + sequence.response_ids
    return await engine.add_request(f"mopd-score-{next(_counter)}", tokens_input(ids), params)


async def _collect(queue: Any, prompt_len: int) -> Scored:
    output = queue.get_nowait() or await queue.get()
    flat = output.prompt_logprobs
    # Entry 0 (the first prompt token) is empty; with prompt_logprobs=0 each further position
    # holds exactly the token that is there.
    if flat.start_indices[1:] != list(range(len(flat) - 1)):
        raise ValueError("the engine returned other than one logprob per position")
    return Scored(flat.token_ids[prompt_len - 1 :], flat.logprobs[prompt_len - 1 :])


async def score(engine: Any, sequences: list[Sequence]) -> list[Scored | Refused]:
    """Score all sequences concurrently; one that the engine refuses does not fail the others."""
    from vllm.v1.engine.exceptions import EngineDeadError

    queues: list[Any] = []
    for sequence in sequences:
        try:
            queues.append(await _submit(engine, sequence))
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM's validation: too long, id outside the vocabulary, ...
            queues.append(error)
    results: list[Scored | Refused] = []
    try:
        for sequence, queue in zip(sequences, queues, strict=True):
            if isinstance(queue, Exception):
                results.append(Refused(f"{type(queue).__name__}: {queue}"))
            else:
                results.append(await _collect(queue, len(sequence.prompt_ids)))
    except BaseException:  # also when the request is cancelled: leave no work behind
        pending = [q.request_id for q in queues[len(results) :] if not isinstance(q, Exception)]
        await asyncio.shield(engine.abort(pending, internal=True))
        raise
    return results


def add_score_route(app: FastAPI, engine: Any) -> None:
    """Add both methods of the route to vLLM's application."""
    decoder = msgspec.json.Decoder(ScoreRequest)
    encoder = msgspec.json.Encoder()

    @app.get("/mopd/score")
    async def describe() -> dict[str, int]:
        return {"protocol": PROTOCOL}

    @app.post("/mopd/score")
    async def post(request: Request) -> Response:
        try:
            body = decoder.decode(await request.body())
        except msgspec.MsgspecError as error:
            return Response(encoder.encode({"error": str(error)}), 400, None, "application/json")
        results = await score(engine, body.sequences)
        return Response(encoder.encode({"results": results}), media_type="application/json")
