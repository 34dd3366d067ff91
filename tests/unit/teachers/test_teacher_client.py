"""TeacherClient against a small HTTP server that fails on purpose (fault injection).

Agreement with real vLLM servers is in tests/integration/test_teacher_servers.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from mopd_teachers.client import Endpoint, ScoreItem, TeacherClient, TeacherFailure
from mopd_teachers.errors import TeacherError
from mopd_teachers.router import TeacherRouter

Scores = dict[str, list[float] | TeacherFailure]


def logprob(context: list[int], token: int) -> float:
    """A number that belongs to this token after this context, and to no other."""
    return -1.0 - (31 * token + sum((i + 1) * t for i, t in enumerate(context))) % 997 / 100


def expected(item: ScoreItem) -> list[float]:
    prompt, response = list(item.prompt_ids), list(item.response_ids)
    return [logprob(prompt + response[:t], response[t]) for t in range(len(response))]


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
        self.model, self.fast, self.score, self.spoil, self.alter = model, fast, score, spoil, alter
        self.posts = 0
        self.armed = False  # spoil and alter only after the probe

    async def __aenter__(self) -> FakeServer:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        if self.fast:
            app.router.add_get("/mopd/score", self.describe)
            app.router.add_post("/mopd/score", self.score_batch)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": 64}]})

    async def describe(self, _: web.Request) -> web.Response:
        return web.json_response({"protocol": 1})

    async def _spoiled(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        self.posts += 1
        return await self.spoil(request, body) if self.armed and self.spoil else None

    async def score_batch(self, request: web.Request) -> web.Response:
        body = await request.json()
        if (spoiled := await self._spoiled(request, body)) is not None:
            return spoiled
        results = [
            {
                "token_ids": s["response_ids"],
                "logprobs": [
                    self.score(s["prompt_ids"] + s["response_ids"][:t], token)
                    for t, token in enumerate(s["response_ids"])
                ],
            }
            for s in body["sequences"]
        ]
        return web.json_response({"results": self.alter(results) if self.armed else results})

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        if (spoiled := await self._spoiled(request, body)) is not None:
            return spoiled
        ids = body["prompt"]
        rows: list[Any] = [None]
        for t in range(1, len(ids)):
            rows.append({str(ids[t]): {"logprob": self.score(ids[:t], ids[t]), "rank": 1}})
        rows = self.alter(rows) if self.armed else rows
        return web.json_response({"choices": [{"index": 0, "prompt_logprobs": rows}]})


def client(*servers: FakeServer, **options: Any) -> TeacherClient:
    options = {"timeout_s": 5.0, "retries": 1} | options
    return TeacherClient("spell", [Endpoint(s.url, s.model) for s in servers], **options)


async def probed_scores(
    server: FakeServer, items: list[ScoreItem], **options: Any
) -> tuple[Scores, dict[str, float]]:
    """Probe a good server, arm its fault, score."""
    async with server, client(server, **options) as teacher:
        await teacher.probe()
        server.armed = True
        before = server.posts
        scores = await teacher.score_batch(items)
        server.posts -= before
        return scores, teacher.metrics()


ITEMS = [
    ScoreItem("7:a:0", (5, 6, 7), (8, 9)),
    ScoreItem("7:a:1", (5, 6, 7), (3,)),  # C01: a response of one token
    ScoreItem("7:b:0", (4,), (9, 9, 9)),
]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_scores_are_those_of_the_response_ids_by_sample_id(fast: bool, order: int) -> None:
    scores, metrics = asyncio.run(probed_scores(FakeServer(fast=fast), ITEMS[::order]))
    assert scores == {item.sample_id: expected(item) for item in ITEMS}
    assert metrics["tokens"] == 6 and metrics["failures"] == 0


def test_our_route_takes_a_batch_in_one_request_and_the_stock_route_one_each() -> None:
    for fast, posts in ((True, 1), (False, 3)):
        server = FakeServer(fast=fast)
        asyncio.run(probed_scores(server, ITEMS))
        assert server.posts == posts


def test_c02_stock_scores_start_after_the_prompt() -> None:
    """`[None, a, b, c]` for P=[x], R=[y, z, w] gives exactly [a, b, c]."""

    def fixed(rows: list[Any]) -> list[Any]:
        return [None, {"2": {"logprob": -0.1}}, {"3": {"logprob": -0.2}}, {"4": {"logprob": -0.3}}]

    item = ScoreItem("s", (1,), (2, 3, 4))
    scores, _ = asyncio.run(probed_scores(FakeServer(fast=False, alter=fixed), [item]))
    assert scores == {"s": [-0.1, -0.2, -0.3]}


def _set_first(key: str, value: Any) -> Callable[[Any], Any]:
    def alter(results: Any) -> Any:
        results[0][key] = value
        return results

    return alter


@pytest.mark.parametrize(
    ("alter", "cause"),
    [
        (_set_first("logprobs", [-1.0]), "bad scores"),  # one short
        (_set_first("logprobs", [-1.0, -1.0, -1.0]), "bad scores"),  # one more
        (_set_first("logprobs", [-1.0, None]), "bad scores"),
        (_set_first("logprobs", [-1.0, math.nan]), "bad scores"),
        (_set_first("logprobs", [-1.0, -math.inf]), "bad scores"),
        (_set_first("logprobs", [-1.0, -9999.0]), "bad scores"),  # vLLM's JSON for -inf
        (_set_first("logprobs", [0.5, -1.0]), "bad scores"),
        (_set_first("logprobs", [True, -1.0]), "bad scores"),
        (_set_first("logprobs", "no list"), "bad scores"),
        (_set_first("token_ids", [9, 8]), "wrong ids"),
        (_set_first("token_ids", [8]), "bad scores"),
        (_set_first("error", "prompt too long"), "refused"),
    ],
)
def test_a_bad_result_fails_its_own_sample_alone(alter: Callable[[Any], Any], cause: str) -> None:
    scores, metrics = asyncio.run(probed_scores(FakeServer(alter=alter), ITEMS))
    failure = scores[ITEMS[0].sample_id]
    assert isinstance(failure, TeacherFailure) and failure.cause == cause
    assert ITEMS[0].sample_id in failure.detail
    assert [scores[i.sample_id] for i in ITEMS[1:]] == [expected(i) for i in ITEMS[1:]]
    assert metrics["failures"] == metrics[f"failures/{cause}"] == 1


def _drop_last(rows: list[Any]) -> list[Any]:
    return rows[:-1]


def _no_null(rows: list[Any]) -> list[Any]:
    return rows[1:] + rows[-1:]


def _other_ids(rows: list[Any]) -> list[Any]:
    return [row and {str(int(k) + 1): v for k, v in row.items()} for row in rows]


def _null_score(rows: list[Any]) -> list[Any]:
    return [row and {k: {"logprob": None} for k in row} for row in rows]


@pytest.mark.parametrize(
    ("alter", "cause"),
    [
        (_drop_last, "bad scores"),
        (_no_null, "bad scores"),
        (_other_ids, "wrong ids"),
        (_null_score, "bad scores"),
        (lambda rows: None, "bad scores"),
    ],
)
def test_bad_stock_answers_are_failures(alter: Callable[[Any], Any], cause: str) -> None:
    scores, _ = asyncio.run(probed_scores(FakeServer(fast=False, alter=alter), ITEMS[:1]))
    failure = scores["7:a:0"]
    assert isinstance(failure, TeacherFailure) and failure.cause == cause


def test_another_number_of_results_fails_the_batch() -> None:
    scores, metrics = asyncio.run(probed_scores(FakeServer(alter=lambda r: r[:-1]), ITEMS))
    assert {s.cause for s in scores.values() if isinstance(s, TeacherFailure)} == {"bad answer"}
    assert metrics["failures"] == 3 and metrics["retries"] == 1


def test_a_500_is_tried_again() -> None:
    left = 2

    async def spoil(*_: Any) -> web.Response | None:
        nonlocal left
        left -= 1
        return web.Response(status=500, text="CUDA error") if left >= 0 else None

    scores, metrics = asyncio.run(probed_scores(FakeServer(spoil=spoil), ITEMS, retries=2))
    assert scores == {item.sample_id: expected(item) for item in ITEMS}
    assert metrics["retries"] == 2 and metrics["failures"] == 0


def test_c12_retries_are_bounded_and_the_samples_fail_by_cause() -> None:
    async def spoil(*_: Any) -> web.Response:
        return web.Response(status=500, text="engine is dead")

    server = FakeServer(spoil=spoil)
    scores, metrics = asyncio.run(probed_scores(server, ITEMS, retries=2))
    failure = scores["7:b:0"]
    assert isinstance(failure, TeacherFailure) and failure.cause == "http 500"
    assert "spell" in failure.detail and "engine is dead" in failure.detail
    assert server.posts == 3 and metrics["retries"] == 2 and metrics["failures/http 500"] == 3


def test_a_400_is_not_tried_again() -> None:
    async def spoil(*_: Any) -> web.Response:
        return web.Response(status=400, text="no")

    server = FakeServer(spoil=spoil)
    scores, metrics = asyncio.run(probed_scores(server, ITEMS, retries=2))
    assert {s.cause for s in scores.values() if isinstance(s, TeacherFailure)} == {"http 400"}
    assert server.posts == 1 and metrics["retries"] == 0


def test_c38_a_teacher_that_never_replies_meets_its_deadline() -> None:
    async def spoil(*_: Any) -> web.Response | None:
        await asyncio.sleep(3600)
        return None

    server = FakeServer(spoil=spoil)
    scores, metrics = asyncio.run(probed_scores(server, ITEMS, timeout_s=0.3))
    failure = scores["7:a:0"]
    assert isinstance(failure, TeacherFailure) and failure.cause == "timeout"
    assert "teacher 'spell'" in failure.detail and "0.3 s" in failure.detail
    assert server.posts == 2 and metrics["retries"] == 1


def test_c12_another_replica_takes_over() -> None:
    async def run() -> tuple[Scores, dict[str, float]]:
        async with FakeServer("a@1") as alive:
            async with FakeServer("a@2") as dying:
                teacher = client(dying, alive)
                await teacher.probe()
            async with teacher:  # `dying` is gone: connections to it are refused
                return await teacher.score_batch(ITEMS), teacher.metrics()

    scores, metrics = asyncio.run(run())
    assert scores == {item.sample_id: expected(item) for item in ITEMS}
    assert metrics["retries"] >= 1 and metrics["failures"] == 0


def test_a_restarted_server_is_probed_before_it_takes_the_place() -> None:
    async def run() -> None:
        async with FakeServer("a@1") as old, FakeServer("a@2") as new, client(old) as teacher:
            await teacher.probe()
            with pytest.raises(TeacherError, match=r"serves \['a@2'\], expected 'a@9'"):
                await teacher.replace_endpoint(0, Endpoint(new.url, "a@9"))
            assert (await teacher.score_batch(ITEMS))["7:a:1"] == expected(ITEMS[1])
            assert new.posts == 0
            await teacher.replace_endpoint(0, Endpoint(new.url, "a@2"))
            posts = old.posts
            assert (await teacher.score_batch(ITEMS))["7:a:1"] == expected(ITEMS[1])
            assert old.posts == posts and new.posts > 0

    asyncio.run(run())


def test_work_is_spread_over_the_replicas() -> None:
    async def run() -> None:
        async with FakeServer("a@1") as one, FakeServer("a@2") as two, client(one, two) as teacher:
            await teacher.probe()
            before = one.posts, two.posts
            items = [ScoreItem(str(i), (4, 5), (6, i % 8)) for i in range(10)]
            assert await teacher.score_batch(items) == {i.sample_id: expected(i) for i in items}
            assert (one.posts - before[0], two.posts - before[1]) == (1, 1)

    asyncio.run(run())


def test_the_client_can_move_to_another_event_loop() -> None:
    async def score(teacher: TeacherClient, server: FakeServer) -> Scores:
        async with server, teacher:
            await teacher.replace_endpoint(0, Endpoint(server.url, server.model))
            return await teacher.score_batch(ITEMS)

    teacher = TeacherClient("spell", [Endpoint("http://127.0.0.1:9", "x")])
    for _ in range(2):
        scores = asyncio.run(score(teacher, FakeServer()))
        assert scores["7:a:0"] == expected(ITEMS[0])


async def _probe(server: FakeServer, model: str | None = None) -> None:
    async with server:
        async with TeacherClient("spell", [Endpoint(server.url, model)], retries=0) as teacher:
            await teacher.probe()


def test_c37_a_stranger_is_told_by_its_model() -> None:
    with pytest.raises(TeacherError, match=r"teacher 'spell'.*serves \['other@9'\].*'spell@1'"):
        asyncio.run(_probe(FakeServer("other@9"), "spell@1"))


def test_without_a_given_name_the_served_one_is_taken() -> None:
    asyncio.run(_probe(FakeServer("whatever")))


def test_c10_a_teacher_without_weights_is_refused() -> None:
    """Every logprob about -ln V."""

    def flat(context: list[int], token: int) -> float:
        return -math.log(259) + 0.001 * (token % 3)

    with pytest.raises(TeacherError, match=r"1 of 259.*lost its weights"):
        asyncio.run(_probe(FakeServer(score=flat)))


def test_a_teacher_that_changes_its_mind_is_refused() -> None:
    calls = 0

    def drifting(context: list[int], token: int) -> float:
        nonlocal calls
        calls += 1
        return logprob(context, token) - 0.01 * calls

    with pytest.raises(TeacherError, match="scored the same tokens twice"):
        asyncio.run(_probe(FakeServer(score=drifting)))


def test_nobody_there() -> None:
    async def run() -> None:
        async with FakeServer() as gone:
            url = gone.url
        async with TeacherClient("spell", [Endpoint(url)], retries=1) as teacher:
            await teacher.probe()

    with pytest.raises(TeacherError, match=r"teacher 'spell'.*tried 2 times.*Is the server"):
        asyncio.run(run())


def test_what_cannot_be_scored_is_not_sent() -> None:
    items = [
        ScoreItem("fits", tuple(range(40)), tuple(range(23))),  # 63 + 1 = the context of 64
        ScoreItem("long", tuple(range(40)), tuple(range(24))),
        ScoreItem("no response", (1, 2), ()),
        ScoreItem("no prompt", (), (1,)),
    ]
    scores, _ = asyncio.run(probed_scores(FakeServer(), items))
    assert scores["fits"] == expected(items[0])
    causes = {key: s.cause for key, s in scores.items() if isinstance(s, TeacherFailure)}
    assert causes == {"long": "too long", "no response": "empty", "no prompt": "empty"}


def test_misuse_is_refused() -> None:
    with pytest.raises(TeacherError, match="no endpoint"):
        TeacherClient("spell", [])
    with pytest.raises(TeacherError, match="is not a URL"):
        TeacherClient("spell", [Endpoint("localhost:8000")])

    async def unprobed() -> None:
        async with FakeServer() as server, client(server) as teacher:
            await teacher.score_batch(ITEMS)

    with pytest.raises(TeacherError, match=r"call probe\(\)"):
        asyncio.run(unprobed())
    with pytest.raises(TeacherError, match="given twice"):
        asyncio.run(probed_scores(FakeServer(), [ITEMS[0], ITEMS[0]]))


def test_c13_each_domain_meets_its_own_teacher_and_no_other() -> None:
    def other(context: list[int], token: int) -> float:
        return logprob(context, token) - 5.0

    async def run() -> None:
        async with FakeServer("m@1") as math_, FakeServer("c@1", score=other) as code:
            math_client, code_client = client(math_), client(code)
            router = TeacherRouter({"math": math_client, "code": code_client, "sums": math_client})
            assert router.clients == [math_client, code_client]
            await router.probe()
            posts = code.posts
            mine, theirs = await asyncio.gather(
                router.score("math", ITEMS), router.score("code", ITEMS[::-1])
            )
            assert mine == {i.sample_id: expected(i) for i in ITEMS}
            assert theirs == {i.sample_id: [x - 5.0 for x in expected(i)] for i in ITEMS}
            assert code.posts == posts + 1
            with pytest.raises(TeacherError, match=r"'Math ' has no teacher.*\['code', 'math'"):
                await router.score("Math ", ITEMS)
            assert router.metrics().keys() == {"spell"}
            await router.close()

    asyncio.run(run())
