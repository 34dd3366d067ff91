"""TeacherClient against a small HTTP server that fails on purpose (fault injection).

Agreement with real vLLM servers is in tests/integration/test_teacher_servers.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from fake_teacher import FakeServer, Scores, client, expected, likeliest, lists, logprob

from mopd_teachers import replica, wire
from mopd_teachers.client import Endpoint, TeacherClient
from mopd_teachers.errors import TeacherError
from mopd_teachers.router import TeacherRouter
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure, TeacherScore


async def probed_scores(
    server: FakeServer, items: list[ScoreItem], **options: Any
) -> tuple[Scores, dict[str, float]]:
    """Probe a good server, arm its fault, score."""
    async with server, client(server, **options) as teacher:
        await teacher.probe()
        server.armed = True
        before = server.posts
        scores = lists(await teacher.score_batch(items))
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
        return [None, {"2": {"logprob": -0.5}}, {"3": {"logprob": -0.25}}, {"4": {"logprob": -2.0}}]

    item = ScoreItem("s", (1,), (2, 3, 4))
    scores, _ = asyncio.run(probed_scores(FakeServer(fast=False, alter=fixed), [item]))
    assert scores == {"s": [-0.5, -0.25, -2.0]}


def _first(**changes: Any) -> Callable[[Any], Any]:
    """Another first result, with floats and ids for lists of them."""

    def alter(results: Any) -> Any:
        packed = {
            key: value
            if isinstance(value, str | bytes)
            else (wire.ids_to_bytes if "ids" in key else wire.floats_to_bytes)(value)
            for key, value in changes.items()
        }
        return [msgspec.structs.replace(results[0], **packed), *results[1:]]

    return alter


@pytest.mark.parametrize(
    ("alter", "cause"),
    [
        (_first(logprobs=[-1.0]), "bad scores"),  # one short
        (_first(logprobs=[-1.0, -1.0, -1.0]), "bad scores"),  # one more
        (_first(logprobs=[-1.0, math.nan]), "bad scores"),
        (_first(logprobs=[-1.0, -math.inf]), "bad scores"),
        (_first(logprobs=[-1.0, -9999.0]), "bad scores"),  # vLLM's JSON for -inf
        (_first(logprobs=[0.5, -1.0]), "bad scores"),
        (_first(logprobs=b"abc"), "bad scores"),
        (_first(token_ids=[9, 8]), "wrong ids"),
        (_first(token_ids=[8]), "bad scores"),
        (_first(error="prompt too long"), "refused"),
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


def test_results_are_matched_by_id_whatever_their_order() -> None:
    scores, metrics = asyncio.run(probed_scores(FakeServer(alter=lambda r: r[::-1]), ITEMS))
    assert scores == {item.sample_id: expected(item) for item in ITEMS}
    assert metrics["retries"] == 0


@pytest.mark.parametrize(
    "alter", [lambda r: r[:-1], lambda r: [*r, r[0]], lambda r: [r[0], r[0], r[1]]]
)
def test_a_missing_or_doubled_result_fails_the_batch(alter: Callable[[Any], Any]) -> None:
    scores, metrics = asyncio.run(probed_scores(FakeServer(alter=alter), ITEMS))
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
                return lists(await teacher.score_batch(ITEMS)), teacher.metrics()

    scores, metrics = asyncio.run(run())
    assert scores == {item.sample_id: expected(item) for item in ITEMS}
    assert metrics["retries"] >= 1 and metrics["failures"] == 0


def test_a_restarted_server_is_probed_before_it_takes_the_place() -> None:
    async def run() -> None:
        async with FakeServer("a@1") as old, FakeServer("a@2") as new, client(old) as teacher:
            await teacher.probe()
            with pytest.raises(TeacherError, match=r"serves \['a@2'\], expected 'a@9'"):
                await teacher.replace_endpoint(0, Endpoint(new.url, "a@9"))
            assert lists(await teacher.score_batch(ITEMS))["7:a:1"] == expected(ITEMS[1])
            assert new.posts == 0
            await teacher.replace_endpoint(0, Endpoint(new.url, "a@2"))
            posts = old.posts
            assert lists(await teacher.score_batch(ITEMS))["7:a:1"] == expected(ITEMS[1])
            assert old.posts == posts and new.posts > 0

    asyncio.run(run())


def test_work_is_spread_over_the_replicas() -> None:
    async def run() -> None:
        async with FakeServer("a@1") as one, FakeServer("a@2") as two, client(one, two) as teacher:
            await teacher.probe()
            before = one.posts, two.posts
            items = [ScoreItem(str(i), (4, 5), (6, i % 8)) for i in range(10)]
            assert lists(await teacher.score_batch(items)) == {
                i.sample_id: expected(i) for i in items
            }
            assert (one.posts - before[0], two.posts - before[1]) == (1, 1)

    asyncio.run(run())


def test_the_client_can_move_to_another_event_loop() -> None:
    async def score(teacher: TeacherClient, server: FakeServer) -> Scores:
        async with server, teacher:
            await teacher.replace_endpoint(0, Endpoint(server.url, server.model))
            return lists(await teacher.score_batch(ITEMS))

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
            assert lists(mine) == {i.sample_id: expected(i) for i in ITEMS}
            assert lists(theirs) == {i.sample_id: [x - 5.0 for x in expected(i)] for i in ITEMS}
            assert code.posts == posts + 1
            with pytest.raises(TeacherError, match=r"'Math ' has no teacher.*\['code', 'math'"):
                await router.score("Math ", ITEMS)
            assert router.metrics().keys() == {"spell"}
            await router.close()

    asyncio.run(run())


# ---- top-k ----------------------------------------------------------------------------------


async def _topk(server: FakeServer, items: list[ScoreItem], top_k: int) -> dict[str, Outcome]:
    async with server, client(server) as teacher:
        await teacher.probe(top_k=top_k, candidates=not top_k)
        server.armed = True
        return await teacher.score_batch(items, top_k=top_k)


@pytest.mark.parametrize("fast", [True, False])
def test_the_teacher_s_own_top_k_comes_beside_the_sampled_token(fast: bool) -> None:
    scores = asyncio.run(_topk(FakeServer(fast=fast), ITEMS, 5))
    for item in ITEMS:
        score = scores[item.sample_id]
        assert isinstance(score, TeacherScore) and score.topk_ids is not None
        assert score.topk_logprobs is not None
        assert score.logprobs.tolist() == expected(item)
        sequence = [*item.prompt_ids, *item.response_ids]
        for t in range(len(item.response_ids)):
            context = sequence[: len(item.prompt_ids) + t]
            best = likeliest(context, 5, logprob)
            assert score.topk_ids[t].tolist() == best
            assert score.topk_logprobs[t].tolist() == [logprob(context, i) for i in best]
        assert score.topk_ids.dtype == np.int32 and score.topk_logprobs.dtype == np.float32


def test_given_candidates_are_scored_in_their_order() -> None:
    given = np.array([[60, 8, 0], [9, 1, 2]], np.int32)
    item = ScoreItem("a", (5, 6, 7), (8, 9), given)
    score = asyncio.run(_topk(FakeServer(), [item], 0))["a"]
    assert isinstance(score, TeacherScore) and score.topk_ids is not None
    assert score.topk_ids.tolist() == given.tolist() and score.topk_logprobs is not None
    assert score.topk_logprobs.tolist() == [
        [logprob([5, 6, 7, 8][: 3 + t], i) for i in row] for t, row in enumerate(given.tolist())
    ]


@pytest.mark.parametrize(
    ("alter", "cause"),
    [
        (_first(topk_ids=[[1, 2]]), "bad scores"),  # a position short
        (_first(topk_logprobs=[[-1.0, -2.0], [-2.0, math.nan]]), "bad scores"),
        (_first(topk_logprobs=[[-1.0, -2.0], [-2.0, -1.0]]), "bad scores"),  # not in order
        (_first(topk_ids=[[1, 1], [1, 2]]), "bad scores"),
        (_first(logprobs=[-1e-3, -1e-3]), "bad scores"),  # likelier than the likeliest
        (_first(topk_ids=[[8, 2], [1, 2]]), "bad scores"),  # the sampled id, another logprob
    ],
)
def test_a_top_k_that_cannot_be_is_a_failure(alter: Callable[[Any], Any], cause: str) -> None:
    """ITEMS[0] has the response (8, 9), neither among the two likeliest."""
    failure = asyncio.run(_topk(FakeServer(alter=alter), ITEMS, 2))["7:a:0"]
    assert isinstance(failure, TeacherFailure) and failure.cause == cause


def test_other_candidates_than_were_sent_are_a_failure() -> None:
    item = ScoreItem("a", (5,), (8,), np.array([[3, 4]], np.int32))
    server = FakeServer(alter=_first(topk_ids=[[4, 3]]))
    failure = asyncio.run(_topk(server, [item], 0))["a"]
    assert isinstance(failure, TeacherFailure) and failure.cause == "wrong ids"


def test_what_a_server_cannot_give_is_refused_at_the_probe() -> None:
    async def probe(server: FakeServer, **needs: Any) -> None:
        async with server, client(server) as teacher:
            await teacher.probe(**needs)

    with pytest.raises(TeacherError, match=r"cannot score ids that it is given.*mopd teachers"):
        asyncio.run(probe(FakeServer(fast=False), candidates=True))
    with pytest.raises(TeacherError, match=r"--max-logprobs.*20"):
        asyncio.run(probe(FakeServer(fast=False), top_k=21))
    with pytest.raises(TeacherError, match="at most the 32 likeliest"):
        asyncio.run(probe(FakeServer(), top_k=33))


def test_a_stranger_that_took_the_port_after_the_probe_scores_nothing() -> None:
    server = FakeServer()

    async def run() -> Scores:
        async with server, client(server, retries=0) as teacher:
            await teacher.probe()
            server.answers_as = "other@9"
            return await teacher.score_batch(ITEMS)

    assert {f.cause for f in asyncio.run(run()).values()} == {"stranger"}


# ---- replicas that are ill ------------------------------------------------------------------


def test_a_server_that_fails_again_and_again_gets_no_requests_until_it_is_well() -> None:
    ill = True

    async def spoil(*_: Any) -> web.Response | None:
        return web.Response(status=500, text="ill") if ill else None

    async def run() -> None:
        nonlocal ill
        bad, good_ = FakeServer("a@1", spoil=spoil), FakeServer("a@2")
        async with bad, good_, client(bad, good_, retries=3) as teacher:
            await teacher.probe()
            bad.armed = True
            batches = [[ScoreItem(f"{i}", (4, 5), (6, i))] for i in range(12)]
            scores = await asyncio.gather(*(teacher.score_batch(b) for b in batches))
            assert all(isinstance(s[str(i)], TeacherScore) for i, s in enumerate(scores))
            assert teacher.servers[0].state == "down" and teacher.servers[1].state == "up"
            assert teacher.metrics()["servers_down"] == 1
            posts = bad.posts
            await teacher.score_batch(ITEMS)
            assert bad.posts == posts, "it rests"
            ill = False
            assert await teacher.revive(0)
            assert teacher.servers[0].state == "up"
            await asyncio.gather(*(teacher.score_batch(b) for b in batches))
            assert bad.posts > posts + 2  # the probe's two, and work

    asyncio.run(run())


def test_the_only_server_is_asked_again_after_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "REST_S", 0.02)
    failing = 4

    async def spoil(*_: Any) -> web.Response | None:
        nonlocal failing
        failing -= 1
        return web.Response(status=503, text="loading") if failing >= 0 else None

    server = FakeServer(spoil=spoil)
    batches = [[ScoreItem(f"{i}", (4, 5), (6, i))] for i in range(4)]

    async def run() -> list[dict[str, Outcome]]:
        async with server, client(server, retries=2) as teacher:
            await teacher.probe()
            server.armed = True
            return await asyncio.gather(*(teacher.score_batch(b) for b in batches))

    for i, scores in enumerate(asyncio.run(run())):
        assert isinstance(scores[str(i)], TeacherScore)


def test_a_server_that_has_become_another_does_not_pass_its_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica, "REST_S", 0.02)

    async def spoil(*_: Any) -> web.Response:
        return web.Response(status=500)

    async def run() -> dict[str, Outcome]:
        server = FakeServer(spoil=spoil)
        async with server, client(server, retries=1) as teacher:
            await teacher.probe()
            server.armed = True
            await asyncio.gather(
                *(teacher.score_batch([ScoreItem(f"{i}", (4,), (5,))]) for i in range(3))
            )
            server.armed, server.model = False, "other@9"
            posts = server.posts
            scores = await teacher.score_batch(ITEMS)
            assert server.posts == posts and not await teacher.revive(0)
            return scores

    assert {f.cause for f in asyncio.run(run()).values()} <= {"stranger", "down"}  # type: ignore[union-attr]


def test_a_slow_server_is_given_what_it_can_do_in_time() -> None:
    """4,000 tokens/s at best and a deadline of 1 s: all at once would take 3 s."""
    busy = asyncio.Lock()

    async def spoil(request: web.Request, _: Any) -> web.Response | None:
        body = wire.decode_request(await request.read())
        tokens = sum(len(s.prompt_ids) + len(s.response_ids) for s in body.sequences) / 4
        async with busy:
            await asyncio.sleep(tokens / 4000)
        return None

    server = FakeServer(spoil=spoil, score=lambda _, token: -1.0 - token / 64)
    items = [ScoreItem(str(i), (1,) * 20, (2,) * 40) for i in range(200)]

    async def run() -> tuple[dict[str, Outcome], dict[str, float]]:
        async with server, client(server, timeout_s=1.0, retries=0) as teacher:
            await teacher.probe()
            server.armed = True
            await teacher.score_batch(items[:40])  # from which it learns the speed
            return await teacher.score_batch(items), teacher.metrics()

    scores, metrics = asyncio.run(run())
    assert all(isinstance(s, TeacherScore) for s in scores.values())
    assert 500 < metrics["tokens_per_s"] < 4200


def test_samples_that_came_back_wrong_are_asked_for_again() -> None:
    first = True

    def alter(results: Any) -> Any:
        nonlocal first
        spoiled = _first(logprobs=[-1.0, math.nan])(results) if first else results
        first = False
        return spoiled

    scores, metrics = asyncio.run(probed_scores(FakeServer(alter=alter), ITEMS))
    assert scores == {item.sample_id: expected(item) for item in ITEMS}
    assert metrics["failures"] == 0


def test_a_key_is_sent_and_never_shown() -> None:
    seen: list[str | None] = []

    async def spoil(request: web.Request, _: Any) -> web.Response | None:
        seen.append(request.headers.get("Authorization"))
        return web.Response(status=401, text="Unauthorized")

    async def run(server: FakeServer) -> tuple[Endpoint, dict[str, Outcome]]:
        async with server:
            endpoint = Endpoint(server.url, server.model, "s3cret")
            async with TeacherClient("spell", [endpoint], retries=1) as teacher:
                await teacher.probe()
                server.armed = True
                return endpoint, await teacher.score_batch(ITEMS)

    endpoint, scores = asyncio.run(run(FakeServer(spoil=spoil)))
    assert seen == ["Bearer s3cret"], "once: a refused key is not tried again"
    assert {f.cause for f in scores.values()} == {"http 401"}  # type: ignore[union-attr]
    assert "s3cret" not in repr((endpoint, scores))
