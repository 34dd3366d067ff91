"""Servers that are busy, slow, sick or another model than they were, and their samples."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from fake_teacher import FakeServer, client, expected, lists, logprob

from mopd_teachers import batches, dispatch, replica, wire
from mopd_teachers.batches import says_one_number
from mopd_teachers.client import Endpoint, TeacherClient
from mopd_teachers.errors import TeacherError
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure, TeacherScore


def batch(count: int, length: int = 6) -> list[ScoreItem]:
    return [
        ScoreItem(str(i), (i % 60, 5, 7), tuple((3 * i + 5 * t) % 60 for t in range(length)))
        for i in range(count)
    ]


def causes(scores: dict[str, Outcome]) -> Counter[str]:
    return Counter(s.cause if isinstance(s, TeacherFailure) else "ok" for s in scores.values())


def right(scores: dict[str, Outcome], items: list[ScoreItem]) -> bool:
    return lists(scores) == {item.sample_id: expected(item) for item in items}


def nan(results: list[wire.Result]) -> list[wire.Result]:
    bad = [wire.floats_to_bytes([math.nan] * (len(r.logprobs) // 4)) for r in results]
    return [msgspec.structs.replace(r, logprobs=b) for r, b in zip(results, bad, strict=True)]


# ---- sick --------------------------------------------------------------------------------------


def test_what_a_sick_server_answers_comes_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says NaN at once, so that it has the least to do: unblamed it would get most requests."""
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.01)

    async def run() -> None:
        async with FakeServer(alter=nan) as sick, FakeServer() as well:
            async with client(sick, well, retries=2) as teacher:
                await teacher.probe()
                sick.armed = True
                for _ in range(3):
                    items = batch(300)
                    assert right(await teacher.score_batch(items), items)
                assert teacher.servers[0].on_trial and not teacher.servers[1].failures_in_a_row
                assert "nan" in teacher.servers[0].last_error

    asyncio.run(run())


def test_one_sample_without_a_score_is_not_its_servers_fault() -> None:
    def one(results: list[wire.Result]) -> list[wire.Result]:
        return [nan([r])[0] if r.id == "3" else r for r in results]

    async def run() -> None:
        async with FakeServer(alter=one) as server, client(server, retries=2) as teacher:
            await teacher.probe()
            server.armed = True
            assert causes(await teacher.score_batch(batch(40))) == {"ok": 39, "bad scores": 1}
            assert teacher.servers[0].state == "up" and server.posts == 2 + 3

    asyncio.run(run())


def test_a_plain_server_is_blamed_for_a_sample_once_all_its_tries_were_wrong() -> None:
    """A request of it has one sample, so that each could be the sample's own fault."""

    def null(rows: list[Any]) -> list[Any]:
        return [rows[0], *(None for _ in rows[1:])]

    async def run() -> list[int]:
        found = []
        async with FakeServer(fast=False, alter=null) as server, client(server) as teacher:
            await teacher.probe()
            server.armed = True
            for _ in range(2):
                assert causes(await teacher.score_batch(batch(1))) == {"bad scores": 1}
                found.append(teacher.servers[0].failures_in_a_row)
        return found

    assert asyncio.run(run()) == [1, 2]


@pytest.mark.parametrize("fast", [True, False])
def test_c10_weights_that_are_lost_while_it_runs_are_noticed(fast: bool) -> None:
    """Every token then has -ln V, which is a number like any other."""

    async def run() -> tuple[Counter[str], str]:
        async with FakeServer(fast=fast) as server, client(server, retries=0) as teacher:
            await teacher.probe()
            server.score = lambda context, token: -math.log(260)
            found = causes(await teacher.score_batch(batch(3, length=12)))
            return found, teacher.servers[0].last_error

    found, error = asyncio.run(run())
    assert not found["ok"] and found["stranger"]
    assert "lost its weights" in error


def test_a_teacher_that_is_sure_of_every_token_is_believed() -> None:
    async def run() -> None:
        async with FakeServer() as server, client(server) as teacher:
            await teacher.probe()
            server.score = lambda context, token: -1e-6
            assert causes(await teacher.score_batch(batch(5))) == {"ok": 5}
            assert server.posts == 3, "two for the probe at the start, one for the samples"

    asyncio.run(run())


# ---- another model under the same name ---------------------------------------------------------


def other(context: list[int], token: int) -> float:
    return logprob(context, token) - 3.0 * (token % 2)


def test_a_plain_server_is_probed_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not say when it was restarted; the name alone says nothing of the weights."""

    async def run() -> None:
        async with FakeServer(fast=False) as server, client(server, retries=0) as teacher:
            await teacher.probe()
            items = batch(6)
            assert right(await teacher.score_batch(items), items)
            assert server.posts == 2 + 6, "the probe speaks for it for a while"
            monkeypatch.setattr(replica, "VOUCH_S", 0.0)
            teacher.servers[0].vouch()
            assert right(await teacher.score_batch(items), items)
            server.score = other
            found = causes(await teacher.score_batch(items))
            assert set(found) <= {"stranger", "down", "restarted"} and found["stranger"]

    asyncio.run(run())


def test_a_plain_server_that_failed_is_probed_before_it_scores() -> None:
    async def refuse_once(*_: Any) -> web.Response | None:
        server.spoil, server.score = None, other  # restarted, as another model
        return web.Response(status=500, text="going down")

    server = FakeServer(fast=False, spoil=refuse_once)

    async def run() -> Counter[str]:
        async with server, client(server, retries=2) as teacher:
            await teacher.probe()
            server.armed = True
            return causes(await teacher.score_batch(batch(1)))

    assert "ok" not in asyncio.run(run())


# ---- busy --------------------------------------------------------------------------------------


def test_ten_clients_of_a_busy_server_all_have_their_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """429 says that there is too much to do, not that it cannot be done."""
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.02)
    state = Counter[str]()

    async def limited(request: web.Request, _: Any) -> web.Response | None:
        count = len(wire.decode_request(await request.read()).sequences)
        if state["now"] + count > 64:
            state["refused"] += 1
            return web.Response(status=429, text="too many", headers={"Retry-After": "x"})
        state["now"] += count
        await asyncio.sleep(0.02)
        state["now"] -= count
        return None

    server = FakeServer(spoil=limited)

    async def run() -> None:
        async with server:
            clients = [client(server, retries=0) for _ in range(10)]
            for teacher in clients:
                await teacher.probe()
            server.armed = True
            items = batch(64)
            scores = await asyncio.gather(*(c.score_batch(items) for c in clients))
            assert all(right(each, items) for each in scores)
            assert [c.servers[0].state for c in clients] == ["up"] * 10
            busy = [c.metrics()["busy"] for c in clients]
            assert sum(busy) == state["refused"] > 0
            assert sum(c.metrics()["retries"] for c in clients) == 0
            for teacher in clients:
                await teacher.close()

    asyncio.run(run())


def test_a_server_that_is_busy_at_the_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.01)
    refused: list[float] = []

    async def refuse_twice(*_: Any) -> web.Response | None:
        refused.append(asyncio.get_running_loop().time())
        if len(refused) > 2:
            return None
        return web.Response(status=429, headers={"Retry-After": "1"} if len(refused) == 2 else {})

    async def run() -> None:
        async with FakeServer(spoil=refuse_twice) as server, client(server, retries=0) as teacher:
            server.armed = True
            await teacher.probe()
            assert teacher.metrics()["busy"] == 2 and teacher.metrics()["retries"] == 0

    asyncio.run(run())
    assert refused[2] - refused[1] >= 0.5, "as long as it asked, but for the jitter"


def test_patience_with_a_busy_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_BACKOFF_S", 0.01)

    async def run() -> Counter[str]:
        async def refuse(*_: Any) -> web.Response:
            return web.Response(status=429, text="too many")

        async with FakeServer(spoil=refuse) as server:
            async with client(server, retries=0, timeout_s=0.05) as teacher:
                teacher._timeout_s = 5.0
                await teacher.probe()
                teacher._timeout_s = 0.05
                server.armed = True
                return causes(await teacher.score_batch(batch(2)))

    assert asyncio.run(run()) == {"http 429": 2}


# ---- slow --------------------------------------------------------------------------------------


def slow(tokens_per_s: float) -> Callable[..., Any]:
    """Work in turn, given up when the client has gone, as a server of ours does."""
    turn = asyncio.Lock()

    async def spoil(request: web.Request, _: Any) -> web.Response | None:
        body = wire.decode_request(await request.read())
        tokens = sum(len(s.prompt_ids) + len(s.response_ids) for s in body.sequences) / 4
        async with turn:
            end = asyncio.get_running_loop().time() + tokens / tokens_per_s
            while asyncio.get_running_loop().time() < end:
                if request.transport is None or request.transport.is_closing():
                    break
                await asyncio.sleep(0.005)
        return None

    return spoil


def test_a_server_too_slow_for_all_at_once_scores_all_in_parts() -> None:
    """Its speed is not known; all together would take three deadlines."""

    async def run() -> None:
        async with FakeServer(spoil=slow(600), score=lambda _, t: -1.0 - t / 64) as server:
            async with client(server, timeout_s=0.5, retries=2) as teacher:
                await teacher.probe()
                server.armed = True
                assert causes(await teacher.score_batch(batch(100))) == {"ok": 100}
                assert teacher.servers[0].state == "up"

    asyncio.run(run())


def test_one_sample_that_takes_too_long_takes_no_other_along() -> None:
    async def stuck(request: web.Request, _: Any) -> web.Response | None:
        if any(s.id == "7" for s in wire.decode_request(await request.read()).sequences):
            await asyncio.sleep(3600)
        return None

    async def run() -> Counter[str]:
        async with FakeServer(spoil=stuck) as server:
            async with client(server, timeout_s=0.3, retries=1) as teacher:
                await teacher.probe()
                server.armed = True
                return causes(await teacher.score_batch(batch(16)))

    found = asyncio.run(run())
    assert found["ok"] == 15 and found["timeout"] == 1


@pytest.mark.parametrize("asked", ["top-k", "candidates"])
def test_no_request_is_too_large_for_its_server(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """One that is refused for its bytes (413) would be lost with all of its samples."""
    monkeypatch.setattr(batches, "BYTES_PER_REQUEST", 2000)
    sizes: list[tuple[int, int]] = []

    async def weigh(request: web.Request, _: Any) -> web.Response | None:
        content = await request.read()
        sizes.append((len(content), len(wire.decode_request(content).sequences)))
        return None

    items = batch(12, length=6)
    if asked == "candidates":
        rows = np.arange(60, dtype=np.int32).reshape(6, 10)
        items = [ScoreItem(i.sample_id, i.prompt_ids, i.response_ids, rows) for i in items]
    top_k = 10 if asked == "top-k" else 0

    async def run() -> None:
        async with FakeServer(spoil=weigh) as server, client(server) as teacher:
            await teacher.probe()
            server.armed = True
            assert causes(await teacher.score_batch(items, top_k=top_k)) == {"ok": 12}

    asyncio.run(run())
    assert sum(count for _, count in sizes) == 12 and len(sizes) == 4, sizes
    assert max(size for size, _ in sizes) < 2000


# ---- answers and addresses that cannot be ------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        {"protocol": wire.PROTOCOL},
        {"protocol": wire.PROTOCOL, "capabilities": 5},
        {"protocol": wire.PROTOCOL, "capabilities": ["sampled"], "max_top_k": "many"},
        {"protocol": wire.PROTOCOL, "capabilities": ["sampled"], "instance": 7},
        [wire.PROTOCOL],
    ],
)
def test_another_programs_answer_on_our_route_makes_it_a_plain_server(said: Any) -> None:
    async def describe(_: web.Request) -> web.Response:
        return web.json_response(said)

    async def run() -> bool | None:
        server = FakeServer()
        server.describe = describe  # type: ignore[method-assign]
        async with server, client(server) as teacher:
            await teacher.probe(top_k=3)
            return teacher.servers[0].fast

    assert asyncio.run(run()) is False


@pytest.mark.parametrize("key", ["abc\n", " abc", "se cret", "ключ", "tab\t"])
def test_a_key_that_cannot_travel_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(TeacherError, match="bearer token has a blank") as caught:
        TeacherClient("t", [Endpoint("http://a:1", None, key)])
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://user:sekret@a:1", "has a user or a password"),
        ("http://user:sekret@a:port", "has a user or a password"),
        ("a:1", "is not a URL"),
        ("ftp://a", "is not a URL"),
        ("http://a:1?model=x", "is not a URL"),
        ("http://a:99999", "is not a URL"),
    ],
)
def test_an_address_that_cannot_be_is_refused(url: str, says: str) -> None:
    with pytest.raises(TeacherError, match=says) as caught:
        TeacherClient("t", [Endpoint(url)])
    assert "sekret" not in str(caught.value)


def test_a_server_that_says_the_key_back_does_not_have_it_shown() -> None:
    async def gossip(*_: Any) -> web.Response:
        return web.Response(status=401, text="no such key: Bearer s3cret")

    async def run() -> str:
        async with FakeServer(spoil=gossip) as server:
            async with TeacherClient(
                "t", [Endpoint(server.url, server.model, "s3cret")]
            ) as teacher:
                await teacher.probe()
                server.armed = True
                failure = (await teacher.score_batch(batch(1)))["0"]
                assert isinstance(failure, TeacherFailure)
                return failure.detail

    assert asyncio.run(run()).endswith("no such key: Bearer ***")


def test_a_server_is_added_once_however_its_address_is_written() -> None:
    async def run() -> None:
        async with FakeServer() as server, client(server) as teacher:
            await teacher.probe()
            for url in (server.url, f"{server.url}/", f"{server.url}/v1/"):
                with pytest.raises(TeacherError, match="is one of its servers already"):
                    await teacher.add_endpoint(Endpoint(url, server.model))

    asyncio.run(run())


def test_what_is_one_number_for_all() -> None:
    flat = {"a": TeacherScore(np.full(9, -5.0, np.float32))}
    assert says_one_number(flat)
    assert not says_one_number({"a": TeacherScore(np.full(9, -0.1, np.float32))})
    assert not says_one_number({"a": TeacherFailure("x", "y")})


class Sick(FakeServer):
    """A plain server that fails its first `count` requests, of those after the probe."""

    def __init__(self, count: float) -> None:
        super().__init__(fast=False, spoil=self._fail)
        self.count = count

    async def _fail(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        self.count -= 1
        return web.Response(status=500) if self.count >= 0 else None


def scored(servers: list[FakeServer], samples: int, **options: Any) -> list[bool]:
    """Which of so many samples have their scores."""

    async def run() -> list[bool]:
        async with AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server)
            teacher = await stack.enter_async_context(client(*servers, concurrency=1, **options))
            await teacher.probe()
            for server, replica_of_it in zip(servers, teacher.servers, strict=True):
                server.armed = True
                # A probe would be spoiled in the place of a sample.
                replica_of_it.went_away = lambda: None  # type: ignore[method-assign]
            batch = [ScoreItem(f"0:{i}:0", (5, 6, i), (8, 9)) for i in range(samples)]
            async with asyncio.timeout(20):
                scores = await teacher.score_batch(batch)
            return [isinstance(scores[i.sample_id], TeacherScore) for i in batch]

    return asyncio.run(run())


def test_to_have_waited_at_a_server_that_failed_others_is_no_try() -> None:
    """Without retries the three are lost that were put to it, and none that waited behind them."""
    assert sorted(scored([Sick(3), FakeServer(fast=False)], 12, retries=0)) == [False] * 3 + (
        [True] * 9
    )


def test_a_lone_server_that_fails_everything_is_soon_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It passes each trial, which asks for no score: those that wait there must not wait until
    each of them has failed by itself, one after each rest."""
    monkeypatch.setattr(replica, "REST_S", 0.05)
    assert scored([Sick(math.inf)], 24, retries=1) == [False] * 24
