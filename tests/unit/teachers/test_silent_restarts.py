"""A plain server in whose place another comes, between two requests, under the same name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_teacher import FakeServer, Scores, client, expected, lists, logprob

from mopd_teachers.client import Endpoint, TeacherClient
from mopd_teachers.scores import ScoreItem, TeacherFailure

ITEMS = [ScoreItem(str(i), (4, 5), (6, i)) for i in range(6)]
ALL_RIGHT = {item.sample_id: expected(item) for item in ITEMS}
PROBE = 2  # requests


def other(context: list[int], token: int) -> float:
    return logprob(context, token) - 3.0 * (token % 2)


def plain(port: int = 0, **options: object) -> FakeServer:
    server = FakeServer("m", fast=False, **options)  # type: ignore[arg-type]
    server.port = port
    return server


async def scored(teacher: TeacherClient) -> Scores:
    return lists(await teacher.score_batch(ITEMS))


def causes(scores: Scores) -> set[str]:
    return {s.cause if isinstance(s, TeacherFailure) else "scored" for s in scores.values()}


@pytest.mark.parametrize("same", [True, False])
def test_a_restart_is_noticed_before_the_next_request(same: bool) -> None:
    async def run() -> None:
        async with plain() as first:
            teacher = client(first, retries=0)
            await teacher.probe()
            assert await scored(teacher) == ALL_RIGHT
            port = int(first.url.rpartition(":")[2])
        async with plain(port) if same else plain(port, score=other) as second, teacher:
            scores = await scored(teacher)
            if not same:
                assert causes(scores) <= {"stranger", "down"}
                return
            assert scores == ALL_RIGHT == await scored(teacher)
            assert second.posts == 2 * len(ITEMS) + PROBE

    asyncio.run(run())


def test_another_checkpoint_behind_a_gateway_is_noticed_by_what_its_answers_say() -> None:
    """The gateway keeps every connection; the answer that says another thing is not used."""

    async def run() -> None:
        server = plain()
        server.fingerprint = "vllm-1-aaaa"
        async with server, client(server, retries=0) as teacher:
            await teacher.probe()
            assert await scored(teacher) == ALL_RIGHT
            before = server.posts
            server.fingerprint = "vllm-1-bbbb"  # configured otherwise, and the same model
            assert await scored(teacher) == ALL_RIGHT == await scored(teacher)
            assert server.posts - before <= 3 * len(ITEMS) + PROBE, "one probe for all"
            server.fingerprint = "vllm-1-aaaa"  # as of two behind one gateway
            before = server.posts
            assert await scored(teacher) == ALL_RIGHT and server.posts - before == len(ITEMS)
            server.fingerprint, server.score = "vllm-1-cccc", other
            assert "scored" not in causes(await scored(teacher))

    asyncio.run(run())


def test_ever_other_fingerprints_cost_no_sample() -> None:
    async def run() -> None:
        server = plain()
        async with server, client(server, retries=2) as teacher:
            turn = 0

            async def count(*_: object) -> None:
                nonlocal turn
                turn += 1
                server.fingerprint = str(turn)

            server.spoil, server.armed = count, True
            await teacher.probe()
            for _ in range(3):
                assert await scored(teacher) == ALL_RIGHT
            before = server.posts
            assert await scored(teacher) == ALL_RIGHT and server.posts - before == len(ITEMS)

    asyncio.run(run())


@asynccontextmanager
async def gateway(to: FakeServer, idle_s: float) -> AsyncIterator[str]:
    """It hangs up on whoever says nothing for so long."""
    open_now: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            data = await asyncio.wait_for(reader.read(65536), idle_s)
        except TimeoutError:
            data = b""
        if data:
            back, on = await asyncio.open_connection("127.0.0.1", int(to.url.rpartition(":")[2]))
            on.write(data)
            for pair in ((back, writer), (reader, on)):
                task = asyncio.ensure_future(pipe(*pair))
                open_now.add(task)
                task.add_done_callback(open_now.discard)
        else:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(open_now):
            task.cancel()


def test_a_gateway_that_hangs_up_on_silence_is_not_watched() -> None:
    """Else every request would be preceded by a probe."""

    async def run() -> None:
        async with plain() as server, gateway(server, 0.05) as url:
            async with TeacherClient("t", [Endpoint(url, "m")], timeout_s=5.0) as teacher:
                await teacher.probe()
                for _ in range(6):
                    await asyncio.sleep(0.1)
                    assert await scored(teacher) == ALL_RIGHT
                assert server.posts <= 6 * len(ITEMS) + 4 * PROBE

    asyncio.run(run())


def test_a_watch_ends_with_its_server_or_client() -> None:
    async def run() -> None:
        async with plain() as one, plain() as two, FakeServer("m") as ours:
            async with client(one, two, ours) as teacher:
                await teacher.probe()
                watched = [server.url for server in teacher._watches]
                assert watched == [one.url, two.url], "ours says itself when it was restarted"
                held = list(teacher._watches.values())
                await teacher.remove_endpoint(0)
                assert [watch.holds for watch in held] == [False, True]
            assert not teacher._watches and not held[1].holds
            # Used again, it watches again.
            await teacher.probe()
            assert [watch.holds for watch in teacher._watches.values()] == [True]
            await teacher.close()

    asyncio.run(run())
