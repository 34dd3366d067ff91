"""Client of one teacher: scores and generates by token ids, over one or several vLLM servers.

Everything is keyed by sample id (see `scores` for what a score is and must pass).

Two ways to the same numbers, chosen once, by asking each server in `probe`: our own route
(`wire`, many sequences a request, arrays) or the `/v1/completions` of any vLLM server (one
sequence a request, `prompt_logprobs`).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import numpy as np

from mopd_teachers import transport, wire
from mopd_teachers.errors import TeacherError
from mopd_teachers.scores import (
    Outcome,
    ScoreItem,
    TeacherFailure,
    TeacherScore,
    score_of_positions,
    score_of_result,
)
from mopd_teachers.stats import TeacherStats
from mopd_teachers.transport import Endpoint, RequestError, Server

__all__ = ["Endpoint", "Generation", "ProbeReport", "ScoreItem", "TeacherClient",
           "TeacherFailure", "TeacherScore"]  # fmt: skip

SEQUENCES_PER_REQUEST = 256
PROMPTS_PER_REQUEST = 64
_BACKOFF_S = 0.2
_BACKOFF_MAX_S = 5.0
_PROBE_IDS = tuple((7 * i + 11) % 64 for i in range(48))  # in every vocabulary of 64 or more
_MIN_SPREAD = 0.05  # nats; a model that knows anything varies by whole nats over 47 tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer: the ids (with the end-of-sequence id when it was drawn) and why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What `probe` found."""

    models: tuple[str, ...]
    """Served name of each server."""
    max_model_len: int
    """Shortest of the servers' contexts, in tokens."""
    fast_route: bool
    """True when every server has our route."""
    capabilities: frozenset[str]
    """What every server can score: `wire.SAMPLED`, `wire.TOP_K`, `wire.CANDIDATES`."""


class TeacherClient:
    """Speaks to the servers of one teacher.

    `timeout_s` is the deadline of each HTTP request, `retries` how often a request is tried
    again, on another server where there is one, `concurrency` how many requests one server has
    at a time.
    """

    def __init__(
        self,
        name: str,
        endpoints: Sequence[Endpoint],
        *,
        timeout_s: float = 60.0,
        retries: int = 2,
        concurrency: int = 64,
    ) -> None:
        if not endpoints:
            raise TeacherError(f"teacher {name!r}: no endpoint given; expected at least one URL")
        self.name = name
        self.stats = TeacherStats()
        self._timeout_s, self._retries, self._concurrency = timeout_s, retries, concurrency
        self._servers = [Server(name, endpoint) for endpoint in endpoints]
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._needs = (0, False)  # the top_k that will be asked for, and whether candidates will

    # ---- life -------------------------------------------------------------------------------

    def _open(self) -> aiohttp.ClientSession:
        """The session of the running event loop (a session cannot move to another loop)."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            for server in self._servers:
                server.slots, server.in_flight = asyncio.Semaphore(self._concurrency), 0
            self._session = aiohttp.ClientSession(
                # Idle connections are dropped before the server (5 s) would.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            )
            self._loop = loop
        return self._session

    async def replace_endpoint(self, index: int, endpoint: Endpoint) -> None:
        """Put a restarted server in the place of the one that died, after probing it.

        Raises TeacherError, and keeps the old one, when the new one does not pass.
        """
        self._open()
        server = Server(self.name, endpoint)
        server.slots = asyncio.Semaphore(self._concurrency)
        await self._probe_server(server)
        self._servers[index] = server

    async def close(self) -> None:
        """Close the connections. The client can be used again afterwards."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    async def __aenter__(self) -> TeacherClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- requests ---------------------------------------------------------------------------

    async def _request(
        self, server: Server, method: str, path: str, body: Any = None, **how: Any
    ) -> Any:
        """One try of one request (see `transport.request`)."""
        return await transport.request(
            self._open(), server, method, path, body, timeout_s=self._timeout_s, **how
        )

    def _least_loaded(self, avoid: Server | None) -> Server:
        others = [s for s in self._servers if s is not avoid] or self._servers
        return min(others, key=lambda s: s.in_flight)

    async def _retried(self, call: Callable[[Server], Awaitable[T]]) -> T:
        """Run `call` on the least loaded server; again, elsewhere if possible, when it fails."""
        self._open()
        server: Server | None = None
        for attempt in range(self._retries + 1):
            server = self._least_loaded(avoid=server)
            server.in_flight += 1
            try:
                async with server.slots:
                    begin = time.perf_counter()
                    result = await call(server)
                    self.stats.request_done(time.perf_counter() - begin)
                    return result
            except RequestError as error:
                if not error.retry or attempt == self._retries:
                    raise
                self.stats.retries += 1
            finally:
                server.in_flight -= 1
            delay = min(_BACKOFF_MAX_S, _BACKOFF_S * 2**attempt)
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    def metrics(self) -> dict[str, float]:
        """Counters of this teacher (see `TeacherStats.snapshot`)."""
        return self.stats.snapshot()

    def _describe(self, error: RequestError) -> str:
        tries = f", tried {self._retries + 1} times" if error.retry and self._retries else ""
        return f"teacher {self.name!r}: {error.detail}{tries}"

    # ---- probe ------------------------------------------------------------------------------

    async def probe(self, *, top_k: int = 0, candidates: bool = False) -> ProbeReport:
        """Ask every server who it is and what it can do, and check that it knows something.

        `top_k` and `candidates` say what will be asked of it later. Raises TeacherError when one
        cannot do that, does not answer, serves another model, gives different scores for the same
        tokens, or gives (about) the same score to every token: the sign of a model whose weights
        are gone, log p = -ln V.
        """
        self._open()
        self._needs = (top_k, candidates)
        for server in self._servers:
            await self._probe_server(server)
        models = tuple(server.model or "" for server in self._servers)
        assert self.max_model_len is not None
        able = frozenset.intersection(*(server.capabilities for server in self._servers))
        return ProbeReport(models, self.max_model_len, all(s.fast for s in self._servers), able)

    @property
    def max_model_len(self) -> int | None:
        """Shortest context of the servers, in tokens; None before `probe`."""
        return min((s.max_model_len for s in self._servers if s.max_model_len), default=None)

    async def _probe_server(self, server: Server) -> None:
        try:
            await self._identify(server)
            await self._check_scores(server)
        except RequestError as error:
            raise TeacherError(
                f"{self._describe(error)}. Is the server running, and is it vLLM?"
            ) from error

    async def _identify(self, server: Server) -> None:
        """Check the served name; note the context length and whether our route is there."""
        answer = await self._again(server, "GET", "/v1/models")
        try:
            cards = {card["id"]: card for card in answer["data"]}
        except (TypeError, LookupError):
            cards = {}
        if not cards:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url}/v1/models lists no model; "
                "expected a vLLM server"
            )
        model = next(iter(cards)) if server.model is None else server.model
        if model not in cards:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url} serves {sorted(cards)}, expected "
                f"{model!r}. Another server answers there, or `model` is wrong"
            )
        length = cards[model].get("max_model_len")
        if not isinstance(length, int) or length < 1:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url} does not say its max_model_len (got "
                f"{length!r}); expected a vLLM server"
            )
        try:
            described = await self._again(server, "GET", wire.PATH)
            if not isinstance(described, Mapping) or described.get("protocol") != wire.PROTOCOL:
                described = None
        except RequestError as error:
            if error.cause not in ("http 404", "http 405"):
                raise
            described = None
        server.model, server.max_model_len, server.fast = model, length, described is not None
        server.capabilities = frozenset((wire.SAMPLED, wire.TOP_K))
        if described is not None:
            server.capabilities = frozenset(described.get("capabilities", ()))
        self._require_able(server, described or {})

    def _require_able(self, server: Server, described: Mapping[str, Any]) -> None:
        """Refuse a server that cannot give what the run will ask for."""
        top_k, candidates = self._needs
        if candidates and wire.CANDIDATES not in server.capabilities:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url} is a vLLM server without the route "
                f"{wire.PATH} (protocol {wire.PROTOCOL}), so it cannot score ids that it is given "
                "(the student's top-k). Let the teacher's own top-k be the support, or serve the "
                "teacher by `mopd teachers serve`"
            )
        limit = described.get("max_top_k")
        if limit is not None and top_k > limit:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url} gives at most the {limit} likeliest ids, "
                f"expected {top_k}; lower top_k"
            )

    async def _again(self, server: Server, method: str, path: str) -> Any:
        """A request to this very server, with the usual retries."""
        for attempt in range(self._retries + 1):
            try:
                return await self._request(server, method, path)
            except RequestError as error:
                if not error.retry or attempt == self._retries:
                    raise
                self.stats.retries += 1
                await asyncio.sleep(_BACKOFF_S * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    async def _check_scores(self, server: Server) -> None:
        response = _PROBE_IDS[1:]
        # Also its own candidate, whose two logprobs `scores` compares.
        given = np.array([(i, (i + 1) % 64) for i in response]) if self._needs[1] else None
        item = ScoreItem("probe", _PROBE_IDS[:1], response, given)
        top_k = 0 if given is not None else self._needs[0]
        try:
            outcomes = [(await self._score_at(server, [item], top_k)) for _ in range(2)]
        except RequestError as error:
            if error.cause == "http 400" and top_k:
                raise TeacherError(
                    f"teacher {self.name!r}: {server.url} refused to give the {top_k} "
                    "likeliest ids; a plain vLLM server gives as many as its --max-logprobs says "
                    f"(20 by default): {error.detail}"
                ) from error
            raise
        found: list[list[float]] = []
        for outcome in outcomes:
            score = outcome["probe"]
            if isinstance(score, TeacherFailure):
                raise TeacherError(
                    f"teacher {self.name!r}: {server.url} cannot score a probe of "
                    f"{len(_PROBE_IDS)} tokens: {score.detail}"
                )
            found.append(score.logprobs.tolist())
        first, second = found
        apart = max(abs(a - b) for a, b in zip(first, second, strict=True))
        if apart > 0.05:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url} scored the same tokens twice and the "
                f"logprobs differ by up to {apart:.3g} nats; expected the same. Is a sampling "
                "parameter or a changing adapter active there?"
            )
        if max(first) - min(first) < _MIN_SPREAD:
            mean = sum(first) / len(first)
            raise TeacherError(
                f"teacher {self.name!r}: {server.url} gives every token the same logprob "
                f"({mean:.3f}, that is 1 of {math.exp(-mean):.0f}): the model has lost its "
                "weights, or never had any. Restart the server from a good checkpoint"
            )

    async def tokenize(self, text: str) -> list[int] | None:
        """Ids that the first server's tokenizer makes of `text`, without special tokens around
        it; None where the server does not say. Raises TeacherError when it does not answer."""
        server = self._servers[0]
        body = {"model": server.model, "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._request(server, "POST", "/tokenize", body)
            return [int(token) for token in answer["tokens"]]
        except RequestError as error:
            if error.cause in ("http 404", "http 405", "http 501"):
                return None
            raise TeacherError(self._describe(error)) from error
        except (LookupError, TypeError, ValueError) as error:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url}/tokenize answered without token ids"
            ) from error

    # ---- scoring ----------------------------------------------------------------------------

    async def score_batch(
        self, items: Sequence[ScoreItem], *, top_k: int = 0
    ) -> dict[str, Outcome]:
        """Each sample's scores, or why there are none, by sample id.

        With `top_k` > 0, also of the teacher's likeliest ids at every response position; an item
        with `candidate_ids` gets those scored instead. Needs `probe` first (TeacherError
        otherwise). Never raises for a sample that fails.
        """
        self._open()
        if any(s.fast is None for s in self._servers):
            raise TeacherError(f"teacher {self.name!r}: call probe() before scoring")
        ids = [item.sample_id for item in items]
        if len(set(ids)) != len(ids):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            raise TeacherError(f"teacher {self.name!r}: sample ids given twice: {twice[:5]}")
        results: dict[str, Outcome] = {}
        live: list[ScoreItem] = []
        for item in items:
            refused = self._refuse(item, top_k)
            if refused is None:
                live.append(item)
            else:
                results[item.sample_id] = refused
        size = self._chunk_size(len(live))
        chunks = [live[i : i + size] for i in range(0, len(live), size)]
        for part in await asyncio.gather(*(self._score_chunk(chunk, top_k) for chunk in chunks)):
            results.update(part)
        for scores in results.values():
            if isinstance(scores, TeacherFailure):
                self.stats.failures[scores.cause] += 1
            else:
                self.stats.tokens += len(scores.logprobs)
        return results

    def _refuse(self, item: ScoreItem, top_k: int) -> TeacherFailure | None:
        """What needs no server to be seen as impossible."""
        given = item.candidate_ids
        if given is not None:
            if top_k:
                raise TeacherError(
                    f"teacher {self.name!r}: sample {item.sample_id} has candidate ids, and top_k "
                    f"is {top_k}; expected one of the two"
                )
            if given.ndim != 2 or len(given) != len(item.response_ids) or not given.shape[1]:
                raise TeacherError(
                    f"teacher {self.name!r}: sample {item.sample_id} has candidate ids of shape "
                    f"{given.shape}; expected [{len(item.response_ids)}, K]"
                )
            if not all(wire.CANDIDATES in s.capabilities for s in self._servers):
                return TeacherFailure(
                    "unsupported",
                    f"sample {item.sample_id}: a server of teacher {self.name!r} cannot score "
                    "given ids",
                )
        if not item.prompt_ids or not item.response_ids:
            return TeacherFailure(
                "empty",
                f"sample {item.sample_id}: {len(item.prompt_ids)} prompt and "
                f"{len(item.response_ids)} response ids; expected at least one of each",
            )
        total = len(item.prompt_ids) + len(item.response_ids)
        # The server wants room for the one token that it has to generate.
        if self.max_model_len is not None and total + 1 > self.max_model_len:
            return TeacherFailure(
                "too long",
                f"sample {item.sample_id}: {total} tokens (+ 1) do not fit teacher "
                f"{self.name!r}'s context of {self.max_model_len}",
            )
        return None

    def _chunk_size(self, count: int) -> int:
        """With our route: large requests, but work for every server. Else one a request."""
        if not all(s.fast for s in self._servers):
            return 1
        return max(1, min(SEQUENCES_PER_REQUEST, math.ceil(count / len(self._servers))))

    async def _score_chunk(self, chunk: Sequence[ScoreItem], top_k: int) -> dict[str, Outcome]:
        try:
            return await self._retried(lambda server: self._score_at(server, chunk, top_k))
        except RequestError as error:
            failure = TeacherFailure(error.cause, self._describe(error))
            return {item.sample_id: failure for item in chunk}

    async def _score_at(
        self, server: Server, chunk: Sequence[ScoreItem], top_k: int
    ) -> dict[str, Outcome]:
        if server.fast:
            return await self._score_fast(server, chunk, top_k)
        return {i.sample_id: await self._score_stock(server, i, top_k) for i in chunk}

    async def _score_fast(
        self, server: Server, chunk: Sequence[ScoreItem], top_k: int
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
                        b""
                        if item.candidate_ids is None
                        else wire.ids_to_bytes(item.candidate_ids),
                    )
                    for item in chunk
                ],
                top_k,
            )
        )
        content = await self._request(
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
        results = {result.id: result for result in reply.results}
        if len(results) != len(reply.results) or results.keys() != {i.sample_id for i in chunk}:
            raise RequestError(
                "bad answer",
                f"{server.url} returned {len(reply.results)} results for {len(results)} ids; "
                f"expected one for each of the {len(chunk)} sequences sent",
                True,
            )
        return {i.sample_id: score_of_result(i, results[i.sample_id], top_k) for i in chunk}

    async def _score_stock(self, server: Server, item: ScoreItem, top_k: int) -> Outcome:
        body = {
            "model": server.model,
            "prompt": [*item.prompt_ids, *item.response_ids],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
        }
        answer = await self._request(server, "POST", "/v1/completions", body)
        try:
            positions = answer["choices"][0]["prompt_logprobs"]
        except (TypeError, LookupError):
            positions = None
        return score_of_positions(item, positions, top_k)

    # ---- generation -------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> list[Generation]:
        """One answer per prompt, in their order; greedy at temperature 0.

        An answer ends at the model's end-of-sequence id or after `max_tokens`. Raises
        TeacherError when a server fails past the retries.
        """
        self._open()
        if any(s.model is None for s in self._servers):
            raise TeacherError(f"teacher {self.name!r}: call probe() before generating")
        size = min(PROMPTS_PER_REQUEST, max(1, math.ceil(len(prompts) / len(self._servers))))
        chunks = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        body = {
            "max_tokens": max_tokens, "temperature": temperature,
            # Said aloud, because servers may take other defaults from the model's folder.
            "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "return_token_ids": True, "detokenize": False,
        }  # fmt: skip
        if seed is not None:
            body["seed"] = seed

        async def one(chunk: Sequence[Sequence[int]]) -> list[Generation]:
            request = body | {"prompt": [list(prompt) for prompt in chunk]}
            answer = await self._retried(
                lambda server: self._request(
                    server, "POST", "/v1/completions", request | {"model": server.model}
                )
            )
            return self._generations(answer, chunk)

        try:
            parts = await asyncio.gather(*(one(chunk) for chunk in chunks))
        except RequestError as error:
            raise TeacherError(self._describe(error)) from error
        return [generation for part in parts for generation in part]

    def _generations(self, answer: Any, chunk: Sequence[Sequence[int]]) -> list[Generation]:
        by_index: dict[int, Generation] = {}
        try:
            for choice in answer["choices"]:
                if list(choice["prompt_token_ids"]) != list(chunk[choice["index"]]):
                    raise TeacherError(
                        f"teacher {self.name!r}: a prompt's ids came back changed; the server "
                        "must take token ids as they are"
                    )
                by_index[choice["index"]] = Generation(
                    tuple(choice["token_ids"]), choice["finish_reason"]
                )
        except (LookupError, TypeError) as error:
            raise TeacherError(
                f"teacher {self.name!r}: /v1/completions returned no token ids; expected a vLLM "
                "server that knows `return_token_ids`"
            ) from error
        if sorted(by_index) != list(range(len(chunk))):
            raise TeacherError(
                f"teacher {self.name!r}: {len(by_index)} answers for {len(chunk)} prompts"
            )
        return [by_index[i] for i in range(len(chunk))]
