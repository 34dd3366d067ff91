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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import aiohttp
import numpy as np

from mopd_teachers import transport, wire
from mopd_teachers.errors import TeacherError
from mopd_teachers.generation import Generation, generate_at, sample_seed
from mopd_teachers.probes import Needs, ProbeReport, probe_server, require_same_model
from mopd_teachers.replica import Endpoint, Replica
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure
from mopd_teachers.scoring import score_at
from mopd_teachers.stats import TeacherStats
from mopd_teachers.transport import RequestError

__all__ = ["Endpoint", "Generation", "ProbeReport", "TeacherClient", "sample_seed"]

SEQUENCES_PER_REQUEST = 256
PROMPTS_PER_REQUEST = 64
_BACKOFF_S = 0.2
_BACKOFF_MAX_S = 5.0
_SAME_MODEL = 0.5  # nats on tokens at random, where two models differ by whole ones
_QUICK_S = 5.0  # deadline of a question that costs the server nothing

DOWN = "down"  # the cause of a request that was not made, because the server just failed a trial
ANSWERED_WRONG = frozenset(("bad scores", "wrong ids"))
"""Causes of samples that are asked for again: the fault may have been on the way."""
SERVER_CAUSES = frozenset(("timeout", "connection", "bad answer", "stranger", DOWN))

T = TypeVar("T")


def is_servers_fault(cause: str) -> bool:
    """Whether a sample failed because a server did not do its work, so that a restart may help."""
    return cause in SERVER_CAUSES or cause.startswith("http 5")


class TeacherClient:
    """Speaks to the servers of one teacher.

    `timeout_s` is the deadline of each HTTP request, `retries` how often a request is tried
    again, on another server where there is one, `concurrency` how many requests one server has
    at a time (fewer where so many could not all meet their deadlines: see `Replica`).
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
        self._servers = [self._replica(endpoint) for endpoint in endpoints]
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._needs = Needs()

    def _replica(self, endpoint: Endpoint) -> Replica:
        return Replica(self.name, endpoint, self._timeout_s, self._concurrency)

    # ---- life -------------------------------------------------------------------------------

    def _open(self) -> aiohttp.ClientSession:
        """The session of the running event loop (a session cannot move to another loop)."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            for server in self._servers:
                server.enter_loop()
            # Idle connections are dropped before the server (5 s) would.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            self._session = aiohttp.ClientSession(connector=connector)
            self._loop = loop
        return self._session

    async def replace_endpoint(self, index: int, endpoint: Endpoint) -> None:
        """Put a restarted server in the place of the one that died, after probing it.

        Raises TeacherError, and keeps the old one, when the new one does not pass.
        """
        self._servers[index] = await self._probed(endpoint)

    async def add_endpoint(self, endpoint: Endpoint) -> None:
        """One server more, after probing it and comparing it with one that is there.

        Raises TeacherError when it does not pass, or serves another model than the others.
        """
        server = await self._probed(endpoint)
        known = min(self._servers, key=lambda s: s.failures_in_a_row)
        try:
            both = [await probe_server(self._again, s, self.name, self._needs)
                    for s in (server, known)]  # fmt: skip
        except RequestError as error:
            raise TeacherError(self._describe(error)) from error
        apart = float(np.abs(both[0] - both[1]).max())
        if apart > _SAME_MODEL:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url} and {known.url} score the same tokens up to "
                f"{apart:.2g} nats apart; expected servers of one model"
            )
        self._servers.append(server)

    async def remove_endpoint(self, index: int) -> None:
        """Give this server no further request; returns when it has none in flight."""
        if len(self._servers) == 1:
            raise TeacherError(f"teacher {self.name!r}: its only server cannot be removed")
        server = self._servers.pop(index)
        await server.idle()

    async def _probed(self, endpoint: Endpoint) -> Replica:
        self._open()
        server = self._replica(endpoint)
        await self._probe(server)
        return server

    async def close(self) -> None:
        """Close the connections. The client can be used again afterwards."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    async def __aenter__(self) -> TeacherClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- what is known of it ----------------------------------------------------------------

    @property
    def max_model_len(self) -> int | None:
        """Shortest context of the servers, in tokens; None before `probe`."""
        return min((s.max_model_len for s in self._servers if s.max_model_len), default=None)

    @property
    def servers(self) -> Sequence[Replica]:
        """The servers, to look at."""
        return tuple(self._servers)

    def metrics(self) -> dict[str, float]:
        """Counters of this teacher (see `TeacherStats.snapshot`), and how its servers are."""
        states = [server.state for server in self._servers]
        speeds = [server.tokens_per_s or 0.0 for server in self._servers]
        return self.stats.snapshot() | {
            "servers": float(len(states)),
            "servers_up": float(states.count("up")),
            "servers_down": float(states.count("down")),
            "tokens_per_s": sum(speeds),
        }

    async def probe(self, *, top_k: int = 0, candidates: bool = False) -> ProbeReport:
        """Ask every server who it is and what it can do, and check that it knows something.

        `top_k` and `candidates` say what will be asked of it later. Raises TeacherError when one
        cannot do that, does not answer, serves another model, gives different scores for the same
        tokens, or gives (about) the same score to every token: the sign of a model whose weights
        are gone, log p = -ln V.
        """
        self._open()
        self._needs = Needs(top_k, candidates)
        for server in self._servers:
            await self._probe(server)
        models = tuple(server.model or "" for server in self._servers)
        assert self.max_model_len is not None
        able = frozenset.intersection(*(server.capabilities for server in self._servers))
        return ProbeReport(models, self.max_model_len, all(s.fast for s in self._servers), able)

    async def _probe(self, server: Replica) -> None:
        try:
            await probe_server(self._again, server, self.name, self._needs)
        except RequestError as error:
            raise TeacherError(
                f"{self._describe(error)}. Is the server running, and is it vLLM?"
            ) from error

    async def revive(self, index: int) -> bool:
        """Whether this server answers and serves its model; if so it takes requests again."""
        server = self._servers[index]
        self._open()
        try:
            await require_same_model(self._quick, server)
            await probe_server(self._ask, server, self.name, self._needs)
        except (RequestError, TeacherError) as error:
            server.last_error = str(error)
            return False
        server.recovered()
        return True

    # ---- requests ---------------------------------------------------------------------------

    async def _ask(
        self, server: Replica, method: str, path: str, body: Any = None, **how: Any
    ) -> Any:
        """One try of one request (see `transport.request`)."""
        how.setdefault("timeout_s", self._timeout_s)
        return await transport.request(self._open(), server, method, path, body, **how)

    async def _quick(
        self, server: Replica, method: str, path: str, body: Any = None, **how: Any
    ) -> Any:
        how["timeout_s"] = min(self._timeout_s, _QUICK_S)
        return await self._ask(server, method, path, body, **how)

    async def _again(
        self, server: Replica, method: str, path: str, body: Any = None, **how: Any
    ) -> Any:
        """A request to this very server, with the usual retries."""
        for attempt in range(self._retries + 1):
            try:
                return await self._ask(server, method, path, body, **how)
            except RequestError as error:
                if not error.retry or attempt == self._retries:
                    raise
                self.stats.retries += 1
                await asyncio.sleep(_BACKOFF_S * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    def _least_loaded(self, avoid: Replica | None) -> Replica:
        """A server that is well and has the least to do; the one that has just failed comes after
        the others, but before one that is on trial."""
        return min(
            self._servers,
            key=lambda s: (s.on_trial, s.resting, s is avoid, s.tokens_in_flight, s.in_flight),
        )

    async def _retried(self, call: Callable[[Replica], Awaitable[T]], tokens: int) -> T:
        """Run `call` on a server; again, elsewhere if possible, when it fails."""
        self._open()
        server: Replica | None = None
        attempt = 0
        while True:
            server = self._least_loaded(avoid=server)
            try:
                if server.on_trial:
                    await self._stand_trial(server)
                async with server.admitted(tokens):
                    if server.on_trial:  # it fell ill while this request waited
                        raise RequestError(DOWN, server.last_error, retry=True)
                    begin = time.perf_counter()
                    result = await call(server)
                    self.stats.request_done(time.perf_counter() - begin)
                    server.succeeded(tokens)
                    return result
            except RequestError as error:
                if error.retry and error.cause != DOWN:
                    server.failed(error.detail)
                if not error.retry or attempt == self._retries:
                    raise
                self.stats.retries += 1
            delay = min(_BACKOFF_MAX_S, _BACKOFF_S * 2**attempt)
            attempt += 1
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))

    async def _stand_trial(self, server: Replica) -> None:
        """Wait for the server's rest to end, then let one request ask whether it is well, for all
        that wait. Raises RequestError when it is not."""
        await asyncio.sleep(server.rest_left_s)
        async with server.trial:
            if not server.on_trial:
                return  # another request found it well
            if server.resting:
                raise RequestError(DOWN, server.last_error, retry=True)
            await require_same_model(self._quick, server)
            server.passed_trial()

    def _describe(self, error: RequestError) -> str:
        tries = f", tried {self._retries + 1} times" if error.retry and self._retries else ""
        return f"teacher {self.name!r}: {error.detail}{tries}"

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
        for _ in range(self._retries + 1):
            for part in await asyncio.gather(
                *(self._score_chunk(chunk, top_k) for chunk in self._chunks(live))
            ):
                results.update(part)
            live = [item for item in live if _answered_wrong(results[item.sample_id])]
            if not live:
                break
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
        # The server wants room for the one token that it has to generate.
        if self.max_model_len is not None and _size(item) + 1 > self.max_model_len:
            return TeacherFailure(
                "too long",
                f"sample {item.sample_id}: {_size(item)} tokens (+ 1) do not fit teacher "
                f"{self.name!r}'s context of {self.max_model_len}",
            )
        return None

    def _chunks(self, items: Sequence[ScoreItem]) -> Iterator[list[ScoreItem]]:
        """With our route: large requests, but work for every server, and none so large that its
        answer could not come in time. Else one sample a request."""
        fast = all(s.fast for s in self._servers)
        most = min(SEQUENCES_PER_REQUEST, math.ceil(len(items) / len(self._servers))) if fast else 1
        tokens = min(s.token_budget for s in self._servers) // 2
        chunk: list[ScoreItem] = []
        size = 0
        for item in items:
            if chunk and (len(chunk) == most or size + _size(item) > tokens):
                yield chunk
                chunk, size = [], 0
            chunk.append(item)
            size += _size(item)
        if chunk:
            yield chunk

    async def _score_chunk(self, chunk: Sequence[ScoreItem], top_k: int) -> dict[str, Outcome]:
        try:
            return await self._retried(
                lambda server: score_at(self._ask, server, chunk, top_k), sum(map(_size, chunk))
            )
        except RequestError as error:
            failure = TeacherFailure(error.cause, self._describe(error))
            return {item.sample_id: failure for item in chunk}

    # ---- text and answers -------------------------------------------------------------------

    async def tokenize(self, text: str) -> list[int] | None:
        """Ids that the first server's tokenizer makes of `text`, without special tokens around
        it; None where the server does not say. Raises TeacherError when it does not answer."""
        server = self._servers[0]
        body = {"model": server.model, "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._ask(server, "POST", "/tokenize", body)
            return [int(token) for token in answer["tokens"]]
        except RequestError as error:
            if error.cause in ("http 404", "http 405", "http 501"):
                return None
            raise TeacherError(self._describe(error)) from error
        except (LookupError, TypeError, ValueError) as error:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url}/tokenize answered without token ids"
            ) from error

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
    ) -> list[Generation]:
        """One answer per prompt, in their order; greedy at temperature 0.

        `seeds` has one of each prompt (see `sample_seed`), which is then a request of its own:
        the same call gives the same answers, and equal prompts are as many samples. None leaves
        the noise to the server.

        An answer ends at the model's end-of-sequence id or after `max_tokens`. Raises
        TeacherError when a server fails past the retries.
        """
        self._open()
        if any(s.model is None for s in self._servers):
            raise TeacherError(f"teacher {self.name!r}: call probe() before generating")
        if seeds is not None and len(seeds) != len(prompts):
            raise TeacherError(
                f"teacher {self.name!r}: {len(seeds)} seeds for {len(prompts)} prompts; expected "
                "one of each"
            )
        size = min(PROMPTS_PER_REQUEST, max(1, math.ceil(len(prompts) / len(self._servers))))
        size = size if seeds is None else 1

        async def one(start: int) -> list[Generation]:
            chunk = prompts[start : start + size]
            seed = None if seeds is None else seeds[start]
            how: dict[str, Any] = {
                "teacher": self.name, "max_tokens": max_tokens, "temperature": temperature,
                "seed": seed,
            }  # fmt: skip
            return await self._retried(
                lambda server: generate_at(self._ask, server, chunk, **how), 0
            )

        try:
            parts = await asyncio.gather(*(one(i) for i in range(0, len(prompts), size)))
        except RequestError as error:
            raise TeacherError(self._describe(error)) from error
        return [generation for part in parts for generation in part]


def _answered_wrong(outcome: Outcome) -> bool:
    return isinstance(outcome, TeacherFailure) and outcome.cause in ANSWERED_WRONG


def _size(item: ScoreItem) -> int:
    return len(item.prompt_ids) + len(item.response_ids)
