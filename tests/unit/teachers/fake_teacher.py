"""A small HTTP server that speaks both scoring routes and fails as it is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from mopd_teachers import wire
from mopd_teachers.client import Endpoint, TeacherClient
from mopd_teachers.scores import Outcome, ScoreItem, TeacherScore

Scores = dict[str, Any]


def logprob(context: list[int], token: int) -> float:
    """A number that belongs to this token after this context, and to no other; a float32."""
    return -1.0 - (31 * token + sum((i + 1) * t for i, t in enumerate(context))) % 997 / 128


def expected(item: ScoreItem) -> list[float]:
    prompt, response = list(item.prompt_ids), list(item.response_ids)
    return [logprob(prompt + response[:t], response[t]) for t in range(len(response))]


def likeliest(context: list[int], k: int, score: Callable[[list[int], int], float]) -> list[int]:
    """The k best of the ids 0..63."""
    return sorted(range(64), key=lambda token: (-score(context, token), token))[:k]


def lists(scores: dict[str, Outcome]) -> Scores:
    """Plain numbers in the place of scores, for comparison."""
    return {
        key: value.logprobs.tolist() if isinstance(value, TeacherScore) else value
        for key, value in scores.items()
    }


class FakeServer:
    """Speaks the two scoring routes; `spoil` may answer a POST in the teacher's place."""

    def __init__(
        self,
        model: str = "teacher@1",
        *,
        fast: bool = True,
        score: Callable[[list[int], int], float] = logprob,
        spoil: Callable[[web.Request, dict[str, Any]], Awaitable[web.Response | None]]
        | None = None,
        alter: Callable[[Any], Any] = lambda results: results,
    ) -> None:
        self.answers_as = model
        self.model, self.fast, self.score, self.spoil, self.alter = model, fast, score, spoil, alter
        self.instance = "1"
        self.port = 0  # any
        self.fingerprint: str | None = None
        self.refuses: int | None = None  # status of every answer, whatever the token
        self.refused = 0
        self.posts = 0
        self.armed = False  # spoil and alter only after the probe

    async def __aenter__(self) -> FakeServer:
        app = web.Application(middlewares=[self.guarded])
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        if self.fast:
            app.router.add_get("/mopd/score", self.describe)
            app.router.add_post("/mopd/score", self.score_batch)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    @web.middleware
    async def guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.refuses is None:
            return await handler(request)  # type: ignore[no-any-return]
        self.refused += 1
        return web.Response(status=self.refuses, text="Unauthorized")

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": 64}]})

    async def describe(self, _: web.Request) -> web.Response:
        able = [wire.SAMPLED, wire.TOP_K, wire.CANDIDATES]
        said = {"capabilities": able, "max_top_k": 32, "instance": self.instance}
        return web.json_response(said | {"protocol": wire.PROTOCOL})

    async def _spoiled(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        self.posts += 1
        return await self.spoil(request, body) if self.armed and self.spoil else None

    async def score_batch(self, request: web.Request) -> web.Response:
        body = wire.decode_request(await request.read())
        if (spoiled := await self._spoiled(request, {})) is not None:
            return spoiled
        results = [self._result(sequence, body.top_k) for sequence in body.sequences]
        if self.armed:
            results = self.alter(results)
        reply = wire.encode(wire.ScoreReply(wire.PROTOCOL, self.answers_as, results, self.instance))
        return web.Response(body=reply)

    def _result(self, sequence: wire.SequenceMsg, top_k: int) -> wire.Result:
        prompt = wire.bytes_to_ids(sequence.prompt_ids, -1).tolist()
        response = wire.bytes_to_ids(sequence.response_ids, -1).tolist()
        contexts = [prompt + response[:t] for t in range(len(response))]
        wide = [likeliest(context, top_k, self.score) for context in contexts]
        if sequence.candidate_ids:
            wide = wire.bytes_to_ids(sequence.candidate_ids, len(response), -1).tolist()
        return wire.Result(
            sequence.id,
            token_ids=sequence.response_ids,
            logprobs=wire.floats_to_bytes(
                [self.score(c, t) for c, t in zip(contexts, response, strict=True)]
            ),
            topk_ids=wire.ids_to_bytes(wide),
            topk_logprobs=wire.floats_to_bytes(
                [[self.score(c, t) for t in row] for c, row in zip(contexts, wide, strict=True)]
            ),
        )

    @staticmethod
    def _answer(index: int, prompt: list[int]) -> dict[str, Any]:
        answer = {"token_ids": [7], "finish_reason": "length"}
        return {"index": index, "prompt_token_ids": prompt} | answer

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        if (spoiled := await self._spoiled(request, body)) is not None:
            return spoiled
        if "return_token_ids" in body:
            return web.json_response(
                {"choices": [self._answer(i, p) for i, p in enumerate(body["prompt"])]}
            )
        ids, k = body["prompt"], body["prompt_logprobs"]
        if k > 20:
            return web.Response(status=400, text="max_logprobs is 20")
        rows: list[Any] = [None]
        for t in range(1, len(ids)):
            better = sum(self.score(ids[:t], i) > self.score(ids[:t], ids[t]) for i in range(64))
            row = {str(ids[t]): {"logprob": self.score(ids[:t], ids[t]), "rank": better + 1}}
            for rank, token in enumerate(likeliest(ids[:t], k, self.score), 1):
                row[str(token)] = {"logprob": self.score(ids[:t], token), "rank": rank}
            rows.append(row)
        rows = self.alter(rows) if self.armed else rows
        answer = {"choices": [{"index": 0, "prompt_logprobs": rows}]}
        return web.json_response(answer | {"system_fingerprint": self.fingerprint})


def client(*servers: FakeServer, **options: Any) -> TeacherClient:
    options = {"timeout_s": 5.0, "retries": 1} | options
    return TeacherClient("spell", [Endpoint(s.url, s.model) for s in servers], **options)
