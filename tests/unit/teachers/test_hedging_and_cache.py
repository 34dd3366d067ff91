"""A second server asked when the first is slow; scores kept by content, of one model alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from fake_teacher import FakeServer, client, expected, lists, logprob

from mopd_teachers import replica, wire
from mopd_teachers.cache import ScoreCache, content_key
from mopd_teachers.client import TeacherClient
from mopd_teachers.errors import TeacherError
from mopd_teachers.scores import ScoreItem, TeacherFailure, TeacherScore

STALL_S = 20.0


def item(name: str, last: int = 9) -> ScoreItem:
    return ScoreItem(name, (5, 6, 7), (8, last))


class Slow(FakeServer):
    """Answers after `wait_s`, and knows how many of its requests were given up."""

    def __init__(self, wait_s: float = STALL_S, **options: Any) -> None:
        super().__init__(**options)
        self.wait_s, self.given_up = wait_s, 0

    async def _spoiled(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        if self.armed:
            self.posts += 1
            try:
                await asyncio.sleep(self.wait_s)
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        return None


async def run(
    servers: list[FakeServer], use: Callable[[TeacherClient], Awaitable[Any]], **options: Any
) -> tuple[Any, dict[str, float]]:
    for server in servers:
        await server.__aenter__()
    try:
        async with client(*servers, **options) as teacher:
            await teacher.probe()
            for server in servers:
                server.posts, server.armed = 0, True
            return await use(teacher), teacher.metrics()
    finally:
        for server in servers:
            await server.__aexit__()


def test_a_second_server_answers_for_a_slow_one_and_each_is_counted_once() -> None:
    slow, quick = Slow(), FakeServer()
    begin = time.monotonic()
    # Of one chunk: both servers are idle, so that the first gets it.
    scores, metrics = asyncio.run(
        run([slow, quick], lambda t: t.score_batch([item("a")]), hedge_after_s=0.2)
    )
    assert lists(scores) == {"a": expected(item("a"))}
    assert 0.2 <= time.monotonic() - begin < STALL_S / 2
    assert (slow.posts, quick.posts, slow.given_up) == (1, 1, 1)
    assert (metrics["hedges"], metrics["hedges_won"], metrics["retries"]) == (1, 1, 0)
    assert metrics["failures"] == 0 and metrics["tokens"] == 2


def test_three_lost_races_rest_the_slow_server() -> None:
    slow, quick = Slow(), FakeServer()

    async def use(teacher: TeacherClient) -> list[str]:
        for number in range(8):
            (score,) = (await teacher.score_batch([item(str(number))])).values()
            assert isinstance(score, TeacherScore)
        return [server.state for server in teacher.servers]

    states, metrics = asyncio.run(run([slow, quick], use, hedge_after_s=0.05))
    assert states == ["down", "up"] and slow.posts == 3 and quick.posts == 8
    assert metrics["hedges"] == metrics["hedges_won"] == 3


@pytest.mark.parametrize(("known", "hedges"), [(19, 3), (20, 0)])
def test_what_takes_as_long_as_most_requests_did_is_not_asked_twice(
    known: int, hedges: int
) -> None:
    """As soon as enough are known. The delay alone would be far below what every request takes."""
    servers: list[FakeServer] = [Slow(wait_s=0.1), Slow(wait_s=0.1)]

    async def use(teacher: TeacherClient) -> None:
        for _ in range(known):
            teacher.stats.request_done(0.5)
        for number in range(3):
            (score,) = (await teacher.score_batch([item(str(number))])).values()
            assert isinstance(score, TeacherScore)
            teacher.stats._latencies_s.pop()

    _, metrics = asyncio.run(run(servers, use, hedge_after_s=0.02, hedge_quantile=0.9))
    assert metrics["hedges"] == hedges


@pytest.mark.parametrize("hedge_after_s", [None, 5.0])
def test_without_it_or_in_time_nobody_is_asked_twice(hedge_after_s: float | None) -> None:
    slow, quick = Slow(wait_s=0.3), FakeServer()
    scores, metrics = asyncio.run(
        run([slow, quick], lambda t: t.score_batch([item("a")]), hedge_after_s=hedge_after_s)
    )
    assert lists(scores) == {"a": expected(item("a"))}
    assert (slow.posts, quick.posts, metrics["hedges"]) == (1, 0, 0)


def test_a_busy_server_is_not_asked_for_another() -> None:
    """Both have their own: the first that is idle takes the other's, and no more than that."""
    slow, busy = Slow(wait_s=1.0), Slow(wait_s=0.6)
    batch = [item("a", 1), item("b", 2)]  # a chunk for each
    scores, metrics = asyncio.run(
        run([slow, busy], lambda t: t.score_batch(batch), hedge_after_s=0.1)
    )
    assert lists(scores) == {i.sample_id: expected(i) for i in batch}
    assert (slow.posts, busy.posts) == (1, 2)
    assert metrics["hedges"] == 1 and metrics["hedges_won"] == 0  # the slow one was nearly done


def test_the_first_answers_where_the_second_fails() -> None:
    async def broken(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=500)

    slow, bad = Slow(wait_s=0.5), FakeServer(spoil=broken)
    scores, metrics = asyncio.run(
        run([slow, bad], lambda t: t.score_batch([item("a")]), hedge_after_s=0.1, retries=0)
    )
    assert lists(scores) == {"a": expected(item("a"))}
    assert (metrics["hedges"], metrics["hedges_won"]) == (1, 0)


def test_the_second_answers_where_the_first_fails_after_it_was_asked() -> None:
    class Failing(Slow):
        async def _spoiled(self, request: web.Request, body: dict[str, Any]) -> Any:
            await super()._spoiled(request, body)
            return web.Response(status=500) if self.armed else None

    servers = [Failing(wait_s=0.4), Slow(wait_s=0.8)]
    scores, metrics = asyncio.run(
        run(servers, lambda t: t.score_batch([item("a")]), hedge_after_s=0.1, retries=0)
    )
    assert lists(scores) == {"a": expected(item("a"))}
    assert (metrics["hedges"], metrics["retries"], metrics["failures"]) == (1, 0, 0)


CACHE = 1 << 20


def test_what_is_given_up_while_it_waits_for_its_turn_leaves_nothing_behind() -> None:
    async def use(teacher: TeacherClient) -> list[Any]:
        before = asyncio.all_tasks()
        asked = [asyncio.create_task(teacher.score_batch([item(str(n))])) for n in range(4)]
        await asyncio.sleep(0.1)
        waiting = [server.load[0] > 3 for server in teacher.servers]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        left = [t for t in asyncio.all_tasks() - before if "Event.wait" in repr(t.get_coro())]
        return [waiting, left, [server.load for server in teacher.servers]]

    servers: list[FakeServer] = [Slow(), Slow()]
    found, _ = asyncio.run(run(servers, use, hedge_after_s=9.0, concurrency=1))
    assert found == [[True, True], [], [(0, 0), (0, 0)]]


def test_equal_questions_are_asked_once_and_again_not_at_all() -> None:
    server = FakeServer()
    batch = [item("a"), item("b"), item("c", 3), item("d")]
    seen: list[int] = []

    async def use(teacher: TeacherClient) -> list[Any]:
        found = []
        for top_k in (0, 0, 2, 2):
            renamed = [ScoreItem(f"{len(found)}{i.sample_id}", i.prompt_ids, i.response_ids)
                       for i in batch]  # fmt: skip
            found.append(await teacher.score_batch(renamed, top_k=top_k))
            seen.append(server.posts)
        return found

    found, metrics = asyncio.run(run([server], use, cache_bytes=CACHE))
    for scores in found:
        assert [s[1:] for s in scores] == ["a", "b", "c", "d"]
        assert list(lists(scores).values()) == [expected(i) for i in batch]
    assert found[3]["3a"].topk_ids is not None and found[1]["1a"].topk_ids is None
    assert seen == [1, 1, 2, 2]  # another top-k is another question
    assert metrics["cache_hits"] == 2 + 4 + 2 + 4 and metrics["tokens"] == 32
    off, metrics = asyncio.run(run([server], lambda t: t.score_batch(batch)))
    assert metrics["cache_hits"] == 0 and len(off) == 4


def test_failures_are_not_kept() -> None:
    def nothing(results: Any) -> Any:
        return [wire.Result(r.id, error="not now") for r in results]

    server = FakeServer(alter=nothing)

    async def use(teacher: TeacherClient) -> Any:
        first = await teacher.score_batch([item("a"), item("b")])
        assert all(isinstance(s, TeacherFailure) for s in first.values()) and len(first) == 2
        server.alter = lambda results: results
        return await teacher.score_batch([item("a")])

    scores, _ = asyncio.run(run([server], use, cache_bytes=CACHE))
    assert lists(scores) == {"a": expected(item("a"))}


def shifted(context: list[int], token: int) -> float:
    """A model a little apart from the other: fine-tuned further, say."""
    return logprob(context, token) - 0.125


@pytest.mark.parametrize("asked", ["the same", "another"])
def test_a_server_that_came_back_with_other_weights_ends_what_was_kept(asked: str) -> None:
    """Same address, same name: only its start gives it away, whatever is asked first."""
    server = FakeServer()

    async def use(teacher: TeacherClient) -> Any:
        await teacher.score_batch([item("a"), item("b", 3)])
        server.score, server.instance = shifted, "2"
        if asked == "another":
            await teacher.score_batch([item("c", 4)])
        return await teacher.score_batch([item("a"), item("b", 3)])

    scores, metrics = asyncio.run(run([server], use, cache_bytes=CACHE))
    assert lists(scores)["a"] == [x - 0.125 for x in expected(item("a"))]
    assert metrics["cache_hits"] == 0


def test_a_server_that_came_back_with_the_same_weights_is_believed() -> None:
    server = FakeServer()

    async def use(teacher: TeacherClient) -> Any:
        await teacher.score_batch([item("a")])
        server.instance = "2"
        await teacher.score_batch([item("b", 3)])  # asked and answered all the same
        return await teacher.score_batch([item("a")])

    scores, metrics = asyncio.run(run([server], use, cache_bytes=CACHE))
    assert lists(scores) == {"a": expected(item("a"))} and metrics["cache_hits"] == 1


@pytest.mark.parametrize("cache_bytes", [0, CACHE])
def test_another_model_under_the_same_name_scores_nothing(
    cache_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "REST_S", 0.05)
    server = FakeServer()

    async def use(teacher: TeacherClient) -> Any:
        await teacher.score_batch([item("a")])
        server.instance = "2"
        server.score = lambda context, token: logprob(context, token) - 3.0 * (token % 2)
        scores = await teacher.score_batch([item("a"), item("b", 3)])
        assert {s.cause for s in scores.values()} == {"stranger"}
        assert "one model" in scores["a"].detail
        again = await teacher.score_batch([item("a")])  # nor is it believed the next time
        assert again["a"].cause == "stranger" and not await teacher.revive(0)
        assert (await teacher.score_batch([item("a")]))["a"].cause == "stranger"
        server.score = logprob  # until it is the teacher again
        return await teacher.score_batch([item("a")])

    scores, metrics = asyncio.run(run([server], use, cache_bytes=cache_bytes, retries=1))
    assert lists(scores) == {"a": expected(item("a"))} and metrics["cache_hits"] == 0


def test_a_plain_server_that_was_found_another_model_scores_nothing_either() -> None:
    server = FakeServer(fast=False)

    async def use(teacher: TeacherClient) -> Any:
        server.score = lambda context, token: logprob(context, token) - 3.0 * (token % 2)
        assert not await teacher.revive(0)
        found = (await teacher.score_batch([item("a")]))["a"]
        assert isinstance(found, TeacherFailure) and found.cause == "stranger"
        server.score = logprob
        return await teacher.score_batch([item("a")])

    scores, _ = asyncio.run(run([server], use, retries=0))
    assert lists(scores) == {"a": expected(item("a"))}


def test_a_server_that_does_not_answer_vouches_for_nothing() -> None:
    server = FakeServer()

    async def use(teacher: TeacherClient) -> Any:
        await teacher.score_batch([item("a")])
        await server.runner.cleanup()
        return await teacher.score_batch([item("a")])

    scores, metrics = asyncio.run(run([server], use, cache_bytes=CACHE, retries=0))
    assert scores["a"].cause == "connection" and metrics["cache_hits"] == 0


def test_a_plain_server_cannot_say_when_it_was_restarted() -> None:
    with pytest.raises(TeacherError, match="does not say when it was restarted"):
        asyncio.run(run([FakeServer(fast=False)], lambda t: t.probe(), cache_bytes=CACHE))


def test_the_least_recently_used_go_first_and_bytes_are_bounded() -> None:
    def score(n: int) -> TeacherScore:
        return TeacherScore(np.zeros(n, np.float32), np.zeros((n, 2), np.int32),
                            np.zeros((n, 2), np.float32))  # fmt: skip

    cache = ScoreCache(3 * (512 + 100 * 20))
    for name in (b"a", b"b", b"c"):
        cache.put(name, score(100), 0)
    assert cache.get(b"a") is not None
    cache.put(b"d", score(100), 0)
    assert cache.get(b"b") is None and cache.get(b"a") is not None and len(cache) == 3
    cache.put(b"e", score(1000), 0)  # larger than all of it
    assert cache.get(b"e") is None and len(cache) == 3 and cache.bytes == 3 * (512 + 100 * 20)
    cache.forget()
    cache.put(b"f", score(1), 0)  # asked for before
    assert len(cache) == 0 and cache.bytes == 0


def test_equal_keys_mean_equal_questions() -> None:
    base = ScoreItem("a", (1, 2), (3, 4))
    given = np.array([[1, 2], [3, 4]], np.int32)
    others = [
        (ScoreItem("b", (1,), (2, 3, 4)), 0),  # cut elsewhere
        (ScoreItem("b", (1, 2), (3, 5)), 0),
        (base, 1),
        (ScoreItem("b", (1, 2), (3, 4), given), 0),
        (ScoreItem("b", (1, 2), (3, 4), given.reshape(2, 2)[:, ::-1]), 0),
        (ScoreItem("b", (1, 2), (3, 4), np.array([[1, 2, 0], [3, 4, 0]])), 0),
    ]
    keys = {content_key(other, top_k) for other, top_k in [(base, 0), *others]}
    assert len(keys) == 7
    assert content_key(ScoreItem("z", [1, 2], [3, 4]), 0) == content_key(base, 0)
