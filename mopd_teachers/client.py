"""Client of one teacher: scores and generates by token ids, over one or several vLLM servers.

Everything is keyed by sample id. A sample either gets exactly one finite logprob for each of its
response ids, or a `TeacherFailure` that says why; nothing is padded, cut or filled in.

Two ways to the same numbers, chosen once, by asking each server in `probe`: our own route
(`score_route`, many sequences a request) or the `/v1/completions` of any vLLM server (one
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

from mopd_teachers.errors import TeacherError
from mopd_teachers.stats import TeacherStats

PROTOCOL = 1  # of our route; the same number as in score_route, which needs vLLM to import
SEQUENCES_PER_REQUEST = 256
PROMPTS_PER_REQUEST = 64
_BACKOFF_S = 0.2
_BACKOFF_MAX_S = 5.0
_PROBE_IDS = tuple((7 * i + 11) % 64 for i in range(48))  # in every vocabulary of 64 or more
_MIN_SPREAD = 0.05  # nats; a model that knows anything varies by whole nats over 47 tokens
_ROUNDING = 1e-4  # nats above 0 that a logprob may have by rounding
_VLLM_MINUS_INF = -9999.0  # what vLLM's JSON says for -inf

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One sample to score: logprobs of `response_ids` given `prompt_ids` and what precedes."""

    sample_id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TeacherFailure:
    """Why one sample has no score. `cause` is short, for counting; `detail` is for reading."""

    cause: str
    detail: str


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


class _RequestError(Exception):
    """One request failed: `cause` for counting, and whether another try may help."""

    def __init__(self, cause: str, detail: str, retry: bool) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail, self.retry = cause, detail, retry


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one server is, and the name it must serve (None: whatever it serves, found out once).

    Replicas that were started here have a name each (`ServerProcess.served_name`).
    """

    url: str
    model: str | None = None


class _Server:
    """One endpoint in use: what it can do, and how much it has to do."""

    def __init__(self, teacher: str, endpoint: Endpoint) -> None:
        if not endpoint.url.startswith(("http://", "https://")):
            raise TeacherError(
                f"teacher {teacher!r}: endpoint {endpoint.url!r} is not a URL; write "
                "http://HOST:PORT"
            )
        self.url = endpoint.url.rstrip("/").removesuffix("/v1")
        self.model = endpoint.model
        self.fast: bool | None = None  # has our route; None: not asked yet
        self.max_model_len: int | None = None
        self.in_flight = 0
        self.slots = asyncio.Semaphore(1)  # replaced by the client, per event loop


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
        self._servers = [_Server(name, endpoint) for endpoint in endpoints]
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

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
        server = _Server(self.name, endpoint)
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

    async def _request(self, server: _Server, method: str, path: str, body: Any = None) -> Any:
        """One try of one request; every way to fail becomes a `_RequestError`."""
        session = self._open()
        try:
            async with session.request(method, server.url + path, json=body) as reply:
                if reply.status != 200:
                    text = (await reply.text())[:300]
                    raise _RequestError(
                        f"http {reply.status}",
                        f"{server.url}{path} answered {reply.status}: {text}",
                        retry=reply.status >= 500 or reply.status in (408, 429),
                    )
                return await reply.json(content_type=None)
        except TimeoutError:
            raise _RequestError(
                "timeout",
                f"{server.url}{path} did not answer within {self._timeout_s:g} s",
                retry=True,
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _RequestError("connection", f"{server.url}: {error}", retry=True) from error
        except ValueError as error:
            raise _RequestError(
                "bad answer", f"{server.url}{path} did not answer in JSON: {error}", retry=True
            ) from error

    def _least_loaded(self, avoid: _Server | None) -> _Server:
        others = [s for s in self._servers if s is not avoid] or self._servers
        return min(others, key=lambda s: s.in_flight)

    async def _retried(self, call: Callable[[_Server], Awaitable[T]]) -> T:
        """Run `call` on the least loaded server; again, elsewhere if possible, when it fails."""
        self._open()
        server: _Server | None = None
        for attempt in range(self._retries + 1):
            server = self._least_loaded(avoid=server)
            server.in_flight += 1
            try:
                async with server.slots:
                    begin = time.perf_counter()
                    result = await call(server)
                    self.stats.request_done(time.perf_counter() - begin)
                    return result
            except _RequestError as error:
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

    def _describe(self, error: _RequestError) -> str:
        tries = f", tried {self._retries + 1} times" if error.retry and self._retries else ""
        return f"teacher {self.name!r}: {error.detail}{tries}"

    # ---- probe ------------------------------------------------------------------------------

    async def probe(self) -> ProbeReport:
        """Ask every server who it is and what it can do, and check that it knows something.

        Raises TeacherError when one does not answer, serves another model, gives different
        scores for the same tokens, or gives (about) the same score to every token: the sign of
        a model whose weights are gone, log p = -ln V.
        """
        self._open()
        for server in self._servers:
            await self._probe_server(server)
        models = tuple(server.model or "" for server in self._servers)
        assert self.max_model_len is not None
        return ProbeReport(models, self.max_model_len, all(s.fast for s in self._servers))

    @property
    def max_model_len(self) -> int | None:
        """Shortest context of the servers, in tokens; None before `probe`."""
        return min((s.max_model_len for s in self._servers if s.max_model_len), default=None)

    async def _probe_server(self, server: _Server) -> None:
        try:
            await self._identify(server)
            await self._check_scores(server)
        except _RequestError as error:
            raise TeacherError(
                f"{self._describe(error)}. Is the server running, and is it vLLM?"
            ) from error

    async def _identify(self, server: _Server) -> None:
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
            described = await self._again(server, "GET", "/mopd/score")
            fast = isinstance(described, Mapping) and described.get("protocol") == PROTOCOL
        except _RequestError as error:
            if error.cause not in ("http 404", "http 405"):
                raise
            fast = False
        server.model, server.max_model_len, server.fast = model, length, fast

    async def _again(self, server: _Server, method: str, path: str) -> Any:
        """A request to this very server, with the usual retries."""
        for attempt in range(self._retries + 1):
            try:
                return await self._request(server, method, path)
            except _RequestError as error:
                if not error.retry or attempt == self._retries:
                    raise
                self.stats.retries += 1
                await asyncio.sleep(_BACKOFF_S * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    async def _check_scores(self, server: _Server) -> None:
        item = ScoreItem("probe", _PROBE_IDS[:1], _PROBE_IDS[1:])
        first, second = [(await self._score_at(server, [item]))["probe"] for _ in range(2)]
        for scores in (first, second):
            if isinstance(scores, TeacherFailure):
                raise TeacherError(
                    f"teacher {self.name!r}: {server.url} cannot score a probe of "
                    f"{len(_PROBE_IDS)} tokens: {scores.detail}"
                )
        assert isinstance(first, list) and isinstance(second, list)
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
        except _RequestError as error:
            if error.cause in ("http 404", "http 405", "http 501"):
                return None
            raise TeacherError(self._describe(error)) from error
        except (LookupError, TypeError, ValueError) as error:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url}/tokenize answered without token ids"
            ) from error

    # ---- scoring ----------------------------------------------------------------------------

    async def score_batch(
        self, items: Sequence[ScoreItem]
    ) -> dict[str, list[float] | TeacherFailure]:
        """[R] logprobs of each sample's response ids, or why there are none, by sample id.

        Needs `probe` first (TeacherError otherwise). Never raises for a sample that fails.
        """
        self._open()
        if any(s.fast is None for s in self._servers):
            raise TeacherError(f"teacher {self.name!r}: call probe() before scoring")
        ids = [item.sample_id for item in items]
        if len(set(ids)) != len(ids):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            raise TeacherError(f"teacher {self.name!r}: sample ids given twice: {twice[:5]}")
        results: dict[str, list[float] | TeacherFailure] = {}
        live: list[ScoreItem] = []
        for item in items:
            refused = self._refuse(item)
            if refused is None:
                live.append(item)
            else:
                results[item.sample_id] = refused
        size = self._chunk_size(len(live))
        chunks = [live[i : i + size] for i in range(0, len(live), size)]
        for part in await asyncio.gather(*(self._score_chunk(chunk) for chunk in chunks)):
            results.update(part)
        for scores in results.values():
            if isinstance(scores, TeacherFailure):
                self.stats.failures[scores.cause] += 1
            else:
                self.stats.tokens += len(scores)
        return results

    def _refuse(self, item: ScoreItem) -> TeacherFailure | None:
        """What needs no server to be seen as impossible."""
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

    async def _score_chunk(
        self, chunk: Sequence[ScoreItem]
    ) -> dict[str, list[float] | TeacherFailure]:
        try:
            return await self._retried(lambda server: self._score_at(server, chunk))
        except _RequestError as error:
            failure = TeacherFailure(error.cause, self._describe(error))
            return {item.sample_id: failure for item in chunk}

    async def _score_at(
        self, server: _Server, chunk: Sequence[ScoreItem]
    ) -> dict[str, list[float] | TeacherFailure]:
        if server.fast:
            return await self._score_fast(server, chunk)
        return {item.sample_id: await self._score_stock(server, item) for item in chunk}

    async def _score_fast(
        self, server: _Server, chunk: Sequence[ScoreItem]
    ) -> dict[str, list[float] | TeacherFailure]:
        body = {
            "model": server.model,
            "sequences": [
                {"prompt_ids": list(i.prompt_ids), "response_ids": list(i.response_ids)}
                for i in chunk
            ],
        }
        answer = await self._request(server, "POST", "/mopd/score", body)
        rows = answer.get("results") if isinstance(answer, Mapping) else None
        if not isinstance(rows, list) or len(rows) != len(chunk):
            got = len(rows) if isinstance(rows, list) else "no"
            raise _RequestError(
                "bad answer",
                f"{server.url} returned {got} results for {len(chunk)} sequences",
                retry=True,
            )
        results: dict[str, list[float] | TeacherFailure] = {}
        for item, row in zip(chunk, rows, strict=True):
            if not isinstance(row, Mapping):
                row = {"error": f"unreadable result {row!r}"}
            if "error" in row:
                detail = f"teacher {self.name!r} refused sample {item.sample_id}: {row['error']}"
                results[item.sample_id] = TeacherFailure("refused", detail)
            else:
                results[item.sample_id] = checked_scores(
                    item, row.get("token_ids"), row.get("logprobs")
                )
        return results

    async def _score_stock(self, server: _Server, item: ScoreItem) -> list[float] | TeacherFailure:
        body = {
            "model": server.model,
            "prompt": [*item.prompt_ids, *item.response_ids],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        answer = await self._request(server, "POST", "/v1/completions", body)
        try:
            positions = answer["choices"][0]["prompt_logprobs"]
        except (TypeError, LookupError):
            positions = None
        total = len(item.prompt_ids) + len(item.response_ids)
        # Entry 0 belongs to the first prompt token, which nothing predicts: it is null, and the
        # response starts at entry P.
        if not isinstance(positions, list) or len(positions) != total or positions[0] is not None:
            got = f"{len(positions)} entries" if isinstance(positions, list) else "none"
            return TeacherFailure(
                "bad scores",
                f"sample {item.sample_id}: prompt_logprobs has {got}; expected {total}, the first "
                "of them null",
            )
        token_ids: list[Any] = []
        logprobs: list[Any] = []
        wanted = zip(item.response_ids, positions[len(item.prompt_ids) :], strict=True)
        for token_id, entry in wanted:
            found = entry.get(str(token_id)) if isinstance(entry, Mapping) else None
            token_ids.append(token_id if found is not None else None)
            logprobs.append(found.get("logprob") if isinstance(found, Mapping) else None)
        return checked_scores(item, token_ids, logprobs)

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
        except _RequestError as error:
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


def checked_scores(item: ScoreItem, token_ids: Any, logprobs: Any) -> list[float] | TeacherFailure:
    """`logprobs` if they are what they must be: one finite number ≤ 0 for each response id."""
    where = f"sample {item.sample_id}"
    if not isinstance(token_ids, list) or not isinstance(logprobs, list):
        return TeacherFailure("bad scores", f"{where}: no list of ids and logprobs returned")
    sent = list(item.response_ids)
    if len(logprobs) != len(sent) or len(token_ids) != len(sent):
        return TeacherFailure(
            "bad scores",
            f"{where}: {len(logprobs)} logprobs and {len(token_ids)} ids for {len(sent)} response "
            "ids",
        )
    for position, (got, want, value) in enumerate(zip(token_ids, sent, logprobs, strict=True)):
        if got != want:
            return TeacherFailure(
                "wrong ids", f"{where}: id {got!r} scored at response position {position}; "
                f"expected {want}",
            )  # fmt: skip
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # NaN and the infinities fail the comparison, too.
        if not number or not _VLLM_MINUS_INF < value <= _ROUNDING:
            return TeacherFailure(
                "bad scores",
                f"{where}: logprob {value!r} at response position {position}; expected a finite "
                "number that is at most 0",
            )
    return [min(float(value), 0.0) for value in logprobs]
