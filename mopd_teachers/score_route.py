"""`/mopd/score` inside the server: a whole batch in one request, arrays in and out (see `wire`).

The logprobs are gathered in vLLM's worker (`scoring_worker`) and come through vLLM's own output
path as arrays: `_ArrayLogprobs` keeps vLLM from making Python objects of each position.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import vllm.v1.engine.output_processor as output_processor
from fastapi import FastAPI, Request, Response
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.logprobs import LogprobsProcessor

from mopd_teachers import wire
from mopd_teachers.asked import EXTRA, asked_of

_CLIENT_LEFT = 499  # nobody reads it
_counter = itertools.count()


class _ArrayLogprobs(LogprobsProcessor):
    """vLLM's processor, except that our requests' prompt logprobs stay the arrays they are."""

    mopd = False

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> _ArrayLogprobs:
        made = super().from_new_request(tokenizer, request)
        made.mopd = asked_of(request.sampling_params) is not None
        return made

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: Any) -> None:
        if not self.mopd:
            super()._update_prompt_logprobs(prompt_logprobs_tensors)
            return
        ids, values = prompt_logprobs_tensors[:2]
        self.prompt_logprobs = (ids.numpy(), values.numpy())


def install_array_logprobs() -> None:
    """Put `_ArrayLogprobs` into this process's output path."""
    output_processor.LogprobsProcessor = _ArrayLogprobs


async def require_scoring_workers(engine: Any) -> None:
    """RuntimeError unless every worker of the engine gathers scores (see `scoring_worker`)."""
    answers = await engine.collective_rpc("mopd_scoring_protocol")
    if set(answers) != {wire.PROTOCOL}:
        raise RuntimeError(
            f"the engine's workers answered {answers} for the scoring protocol; expected "
            f"{wire.PROTOCOL} from each. Is another model runner or worker class active "
            "(VLLM_USE_V2_MODEL_RUNNER, --worker-cls)?"
        )


class TooMuch(Exception):
    """Refused for its size or for what is in flight already; `status` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Scorer:
    """Scores batches on one engine. `model` is the served name that a request must give.

    At most `max_sequences` are in flight together (status 429 past that). `prefix_block` > 0: the
    engine may take prompts out of its prefix cache, in blocks of so many tokens, of which it holds
    `prefix_tokens` (see `prefix_scheduler`).
    """

    def __init__(
        self,
        engine: Any,
        model: str,
        max_sequences: int = 16_384,
        prefix_block: int = 0,
        prefix_tokens: int = 0,
    ) -> None:
        self._engine, self.model, self._max_sequences = engine, model, max_sequences
        self._prefix_block, self._prefix_tokens = prefix_block, prefix_tokens
        self.in_flight = 0
        self.instance = secrets.token_hex(8)
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self.vocab_size = int(engine.model_config.get_vocab_size())
        self.max_top_k = min(wire.MAX_TOP_K, self.vocab_size)

    def describe(self) -> dict[str, Any]:
        """What GET answers."""
        return {
            "protocol": wire.PROTOCOL,
            "model": self.model,
            "instance": self.instance,
            "capabilities": [wire.SAMPLED, wire.TOP_K, wire.CANDIDATES],
            "vocab_size": self.vocab_size,
            "max_top_k": self.max_top_k,
            "prefix_block": self._prefix_block,
            "prefix_tokens": self._prefix_tokens,
        }

    async def _submit(self, sequence: wire.SequenceMsg, top_k: int) -> tuple[Any, int]:
        """Hand one sequence to the engine; (queue its result will come through, R)."""
        prompt = wire.bytes_to_ids(sequence.prompt_ids, -1)
        response = wire.bytes_to_ids(sequence.response_ids, -1)
        if not len(prompt) or not len(response):
            raise ValueError(
                f"prompt of {len(prompt)} and response of {len(response)} tokens: both need at "
                "least one"
            )
        width = top_k
        if sequence.candidate_ids:
            if top_k:
                raise ValueError("top_k and candidate_ids were both given; expected one of them")
            candidates = wire.bytes_to_ids(sequence.candidate_ids, len(response), -1)
            self._require_known(candidates)
            width = candidates.shape[1]
        # vLLM counts what it added to the embeddings (LoRA, padding) as vocabulary, too.
        self._require_known(response)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=not self._prefix_block,
            extra_args={
                EXTRA: {
                    "first": len(prompt) - 1,
                    "top_k": top_k,
                    "width": width,
                    "candidates": sequence.candidate_ids,
                }
            },
        )
        ids = [*prompt.tolist(), *response.tolist()]
        name = f"mopd-score-{next(_counter)}"
        return await self._engine.add_request(name, tokens_input(ids), params), len(response)

    def _require_known(self, ids: np.ndarray) -> None:
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if outside.size:
            raise ValueError(
                f"id {outside.flat[0]} is outside the model's vocabulary of {self.vocab_size}"
            )

    @staticmethod
    async def _collect(sequence: wire.SequenceMsg, queue: Any, length: int) -> wire.Result:
        output = queue.get_nowait() or await queue.get()
        arrays = output.prompt_logprobs
        if not isinstance(arrays, tuple) or len(arrays[0]) != length:
            raise ValueError("the engine's worker did not gather this sequence's scores")
        ids, values = arrays
        wide = ids.shape[1] > 1
        return wire.Result(
            id=sequence.id,
            token_ids=wire.ids_to_bytes(ids[:, 0]),
            logprobs=wire.floats_to_bytes(values[:, 0]),
            topk_ids=wire.ids_to_bytes(ids[:, 1:]) if wide else b"",
            topk_logprobs=wire.floats_to_bytes(values[:, 1:]) if wide else b"",
            cached=output.num_cached_tokens or 0,
        )

    async def score(self, sequences: Sequence[wire.SequenceMsg], top_k: int) -> list[wire.Result]:
        """Score all concurrently; one that the engine refuses does not fail the others."""
        queues: list[Any] = []
        for sequence in sequences:
            try:
                queues.append(await self._submit(sequence, top_k))
            except EngineDeadError:
                raise
            except Exception as error:  # vLLM's validation: too long, ...
                queues.append(error)
        results: list[wire.Result] = []
        try:
            for sequence, queue in zip(sequences, queues, strict=True):
                if isinstance(queue, Exception):
                    text = f"{type(queue).__name__}: {queue}"
                    results.append(wire.Result(sequence.id, error=text))
                else:
                    results.append(await self._collect(sequence, *queue))
        except BaseException:  # also when the request is cancelled: leave no work behind
            left = [q[0].request_id for q in queues[len(results) :] if isinstance(q, tuple)]
            if left:
                await asyncio.shield(self._engine.abort(left, internal=True))
            raise
        return results

    def metrics(self) -> str:
        """In Prometheus' text format. Tokens are response tokens; seconds are of answered
        requests, which overlap."""
        lines = ["# TYPE mopd_score_sequences_in_flight gauge"]
        lines.append(f"mopd_score_sequences_in_flight {self.in_flight}")
        totals = {
            name: self.counts[name]
            for name in ("requests", "sequences", "refused", "tokens", "cached_prompt_tokens")
        }
        for name, value in {**totals, "request_seconds": self.seconds}.items():
            lines += [f"# TYPE mopd_score_{name}_total counter", f"mopd_score_{name}_total {value}"]
        return "\n".join(lines) + "\n"

    async def answer(self, body: bytes) -> tuple[int, bytes]:
        """Status and content of one POST; an error's content is text."""
        try:
            request = wire.decode_request(body)
        except wire.WireError as error:
            return 400, f"not a score request of protocol {wire.PROTOCOL}: {error}".encode()
        if request.protocol != wire.PROTOCOL:
            return 400, f"protocol {request.protocol}; this server speaks {wire.PROTOCOL}".encode()
        if request.model != self.model:
            return 404, f"this server serves {self.model!r}, not {request.model!r}".encode()
        if not 0 <= request.top_k <= self.max_top_k:
            return 400, f"top_k {request.top_k} is outside 0..{self.max_top_k}".encode()
        count = len(request.sequences)
        if self.in_flight + count > self._max_sequences:
            return (
                429,
                f"{self.in_flight} sequences in flight, at most {self._max_sequences}".encode(),
            )
        begin = time.perf_counter()
        self.in_flight += count
        try:
            results = await self.score(request.sequences, request.top_k)
        finally:
            self.in_flight -= count
        self.seconds += time.perf_counter() - begin
        refused = sum(bool(result.error) for result in results)
        self.counts.update(requests=1, sequences=count - refused, refused=refused)
        self.counts["cached_prompt_tokens"] += sum(result.cached for result in results)
        self.counts["tokens"] += sum(len(result.token_ids) // 4 for result in results)
        reply = wire.ScoreReply(wire.PROTOCOL, self.model, results, self.instance)
        return 200, wire.encode(reply)


def add_score_route(app: FastAPI, scorer: Scorer, max_body: int = 256 << 20) -> None:
    """Add the route, and its metrics for Prometheus, to vLLM's application. Who may ask is
    for `guard` to say."""

    @app.get(wire.PATH)
    async def describe() -> dict[str, Any]:
        return scorer.describe()

    @app.get(f"{wire.PATH}/metrics")
    async def metrics() -> Response:
        return Response(scorer.metrics(), media_type="text/plain; version=0.0.4")

    @app.post(wire.PATH)
    async def post(request: Request) -> Response:
        try:
            body = await _body(request, max_body)
        except TooMuch as error:
            return Response(str(error), error.status)
        answering = asyncio.ensure_future(scorer.answer(body))
        leaving = asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=_CLIENT_LEFT)
        finally:  # a client that has its answer from elsewhere leaves no work behind
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(leaving, answering, return_exceptions=True)
        status, content = answering.result()
        return Response(content, status, media_type=wire.CONTENT_TYPE if status == 200 else None)


async def _hung_up(request: Request) -> None:
    """Returns when the client, whose body has been read, is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, most: int) -> bytes:
    """The request's body; TooMuch as soon as more than `most` bytes have come."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise TooMuch(413, f"the request is larger than {most} bytes; send fewer sequences")
        parts.append(part)
    return b"".join(parts)
