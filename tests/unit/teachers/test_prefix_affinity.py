"""Where a request goes when servers keep the beginnings of what they have read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from fake_teacher import FakeServer, client, expected, lists

from mopd_teachers import wire
from mopd_teachers.asked import EXTRA, asked_of
from mopd_teachers.client import TeacherClient
from mopd_teachers.prefixes import PrefixMemory, Reading, prompts_together
from mopd_teachers.replica import FIRST_TOKENS, Endpoint, Replica
from mopd_teachers.scores import ScoreItem

BLOCK = 4


def item(name: str, prompt: Sequence[int], response: Sequence[int] = (1,)) -> ScoreItem:
    return ScoreItem(name, tuple(prompt), tuple(response))


def to_read(memory: PrefixMemory, *items: ScoreItem) -> int:
    return memory.to_read(Reading(items))


def test_whole_blocks_of_the_prompt_are_read_once() -> None:
    memory = PrefixMemory(BLOCK, 1000)
    nine = item("a", range(9), [50, 51, 52])
    assert to_read(memory, nine) == 12  # nothing is known
    assert to_read(memory, nine, nine) == 12 + 4  # of the second the first two blocks are
    memory.sent(Reading([nine]))
    assert to_read(memory, nine) == 4
    assert to_read(memory, item("b", range(8), [8, 50])) == 10 - 4  # the last token of 8 is needed
    assert to_read(memory, item("c", [*range(4), 9, 9, 9, 9, 9])) == 10 - 4  # known to the 4th
    assert to_read(memory, item("d", [9, *range(1, 9)])) == 10  # equal after another beginning
    # A later turn: the first answer is in the prompt, and its block was read.
    assert to_read(memory, item("e", [*range(9), 50, 51, 52, 53])) == 14 - 12
    memory.forget()
    assert to_read(memory, nine) == 12


def test_what_was_used_least_recently_goes_first_and_ends_go_before_beginnings() -> None:
    memory = PrefixMemory(BLOCK, 4 * BLOCK)
    a, b = item("a", range(9), range(3)), item("b", range(100, 109))
    memory.sent(Reading([a]))  # three blocks
    memory.sent(Reading([b]))  # two: one of a's must go
    assert to_read(memory, b) == 10 - 8 and to_read(memory, a) == 12 - 8
    memory.sent(Reading([item("c", range(200, 205))]))  # one
    assert to_read(memory, a) == 12 - 4 and to_read(memory, b) == 10 - 8
    # A cache of less than a block holds nothing.
    small = PrefixMemory(BLOCK, BLOCK - 1)
    small.sent(Reading([a]))
    assert to_read(small, a) == 12


def test_samples_of_a_long_prompt_stay_together() -> None:
    long = [item(f"l{i}", range(17), range(8)) for i in range(4)]  # 16 again, 32 of responses
    short = [item(f"s{i}", range(30, 40), range(8)) for i in range(4)]  # 8 again
    mixed = [sample for pair in zip(short, long, strict=True) for sample in pair]
    groups = prompts_together(mixed, BLOCK)
    assert [[i.sample_id for i in group] for group in groups] == [
        ["s0"], ["s1"], ["s2"], ["s3"], ["l0", "l1", "l2", "l3"],
    ]  # fmt: skip


class Server(FakeServer):
    """Says that it has a prefix cache; knows what it got, and answers when it may."""

    def __init__(self, block: Any = BLOCK, tokens: Any = 4096) -> None:
        super().__init__()
        self.says = {"prefix_block": block, "prefix_tokens": tokens}
        self.got: list[list[str]] = []
        self.may = asyncio.Event()
        self.may.set()

    async def describe(self, _: web.Request) -> web.Response:
        able = [wire.SAMPLED, wire.TOP_K, wire.CANDIDATES]
        said = {"capabilities": able, "max_top_k": 32, "instance": self.instance}
        return web.json_response(said | {"protocol": wire.PROTOCOL} | self.says)

    async def score_batch(self, request: web.Request) -> web.Response:
        if self.armed:
            body = wire.decode_request(await request.read())
            self.got.append([sequence.id for sequence in body.sequences])
            await self.may.wait()
        return await super().score_batch(request)

    def prompts(self) -> set[str]:
        """The samples' ids to the dot."""
        return {name.partition(".")[0] for part in self.got for name in part}


def run(use: Callable[[TeacherClient, Server, Server], Awaitable[Any]], **says: Any) -> None:
    async def whole() -> None:
        async with AsyncExitStack() as stack:
            one, two = [await stack.enter_async_context(Server(**says)) for _ in range(2)]
            teacher = await stack.enter_async_context(client(one, two, timeout_s=60.0))
            await teacher.probe()
            one.armed = two.armed = True
            await use(teacher, one, two)

    asyncio.run(whole())


def group(prompt: int, *, length: int, response: int, count: int = 8) -> list[ScoreItem]:
    return [
        item(f"{prompt}.{i}", [(prompt + t) % 60 for t in range(length)], [i] * response)
        for i in range(count)
    ]


def test_the_samples_of_a_long_prompt_go_to_one_server_and_come_back_there() -> None:
    async def use(teacher: TeacherClient, one: Server, two: Server) -> None:
        batches = [group(p, length=40, response=2) for p in range(8)]
        for _ in range(2):
            scores = await asyncio.gather(*map(teacher.score_batch, batches))
            for batch, found in zip(batches, scores, strict=True):
                assert lists(found) == {i.sample_id: expected(i) for i in batch}
        # But for the first, whose second half found the other server idle.
        assert one.prompts() & two.prompts() == {"0"}
        assert len(one.prompts()) in (4, 5) and len(two.prompts()) in (4, 5)
        # In one batch as well, whose parts begin where a prompt does.
        one.got, two.got = [], []
        fresh = [i for p in range(20, 28) for i in group(p, length=40, response=2)]
        await teacher.score_batch(fresh[4:])
        assert sorted(map(len, one.got + two.got)) == [8, 24, 28]
        assert one.prompts().isdisjoint(two.prompts())

    run(use)


def test_long_responses_are_shared_out_and_so_is_what_no_server_keeps() -> None:
    async def use(teacher: TeacherClient, one: Server, two: Server) -> None:
        batch = group(0, length=9, response=20)
        assert len(await teacher.score_batch(batch)) == 8
        assert sorted(map(len, one.got + two.got)) == [4, 4] and len(one.got) == 1

    run(use)
    run(use, block=0)


async def _send_slowly(teacher: TeacherClient, items: Sequence[ScoreItem]) -> list[Any]:
    tasks = []
    for sample in items:
        tasks.append(asyncio.ensure_future(teacher.score_batch([sample])))
        await asyncio.sleep(0.02)
    return tasks


@pytest.mark.parametrize("busy", [False, True])
def test_a_prompt_leaves_its_server_once_that_saves_less_than_it_costs(busy: bool) -> None:
    """Each sample is 6 tokens there and 42 elsewhere. An idle server gets one as soon as 42 tokens
    are less than the queue; one that has 42 to do itself only for 42 + 42 + 2 x 36."""

    async def use(teacher: TeacherClient, one: Server, two: Server) -> None:
        (start, *again) = group(0, length=40, response=2, count=30)
        await teacher.score_batch([start])
        home, other = (one, two) if one.got else (two, one)
        home.may.clear()
        other.may.clear()
        tasks = await _send_slowly(teacher, again[:1])
        if busy:
            tasks += await _send_slowly(teacher, group(7, length=40, response=2, count=1))
            assert other.prompts() == {"7"}
        stay = 25 if busy else 6
        tasks += await _send_slowly(teacher, again[1:stay])
        assert len(home.got) == 1 + stay and len(other.got) == busy
        tasks += await _send_slowly(teacher, again[stay : stay + 2])
        assert "0" in other.prompts()
        home.may.set()
        other.may.set()
        await asyncio.gather(*tasks)

    run(use)


@pytest.mark.parametrize("says", [{"block": -1}, {"block": "16"}, {"tokens": 1.5}])
def test_a_route_that_says_nonsense_of_its_cache_is_not_ours(says: dict[str, Any]) -> None:
    async def use(teacher: TeacherClient, one: Server, two: Server) -> None:
        assert not teacher.servers[0].fast

    run(use, **says)


def test_a_server_that_failed_is_not_believed_to_keep_anything() -> None:
    async def use(teacher: TeacherClient, one: Server, two: Server) -> None:
        batch = group(0, length=40, response=2)
        await teacher.score_batch(batch[:1])
        (server,) = [s for s in teacher.servers if s.to_read(Reading(batch)) < 8 * 6 + 1]
        server.failed("gone")
        assert server.to_read(Reading(batch)) == 42 + 7 * 6

    run(use)


def test_a_small_request_does_not_overtake_the_one_that_reads_its_prompt() -> None:
    """Else it reads the prompt itself, as one of hundreds that were let in as small ones."""

    async def use() -> None:
        server = Replica("t", Endpoint("http://127.0.0.1:1"), timeout_s=60.0, concurrency=3)
        began: list[str] = []
        ends = {name: asyncio.Event() for name in "abcdef"}

        async def request(name: str, tokens: int) -> None:
            async with server.admitted(tokens):
                began.append(name)
                await ends[name].wait()

        async def begin(name: str, tokens: int) -> asyncio.Task[None]:
            task = asyncio.create_task(request(name, tokens))
            await asyncio.sleep(0.01)
            return task

        a = await begin("a", FIRST_TOKENS - 100)
        b, c = await begin("b", 8000), await begin("c", 10)
        assert began == ["a"] and server.load == (FIRST_TOKENS - 100 + 8010, 1)
        ends["a"].set()
        await a
        await asyncio.sleep(0.01)
        assert began == ["a", "b", "c"]
        # One that is too large for any company goes alone, and does go, whatever comes after it.
        d, e, f = await begin("d", 2 * FIRST_TOKENS), await begin("e", 1), await begin("f", 1)
        ends["b"].set()
        ends["c"].set()
        await asyncio.gather(b, c)
        await asyncio.sleep(0.01)
        assert began[3:] == ["d"] and server.load == (2 * FIRST_TOKENS + 2, 1)
        # What is given up, waiting or begun, holds nobody back.
        e.cancel()
        await asyncio.sleep(0.01)
        assert began[3:] == ["d"] and server.load == (2 * FIRST_TOKENS + 1, 1)
        d.cancel()
        await asyncio.sleep(0.01)
        assert began[3:] == ["d", "f"] and server.load == (1, 1)
        idle = asyncio.create_task(server.idle())
        await asyncio.sleep(0.01)
        assert not idle.done()
        ends["f"].set()
        await asyncio.gather(f, idle)
        assert server.load == (0, 0)

    asyncio.run(use())


def test_other_requests_go_on_while_a_large_batch_finds_its_servers() -> None:
    """That takes time in proportion to tokens: with 10,000 long samples, seconds."""
    ticks, chosen = 0, []

    class Noted(PrefixMemory):
        def sent(self, reading: Reading) -> None:
            chosen.append(ticks)
            super().sent(reading)

    async def clock() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def use(teacher: TeacherClient, one: Server, two: Server) -> None:
        for server in teacher.servers:
            server.prefixes = Noted(BLOCK, 4096)
            server._most_tokens = 2.0  # a request for each sample
        running = asyncio.create_task(clock())
        await teacher.score_batch(group(0, length=40, response=2, count=60))
        running.cancel()
        assert len(chosen) == 60 and max(Counter(chosen).values()) <= 16

    run(use)


def test_a_client_s_own_argument_of_that_name_is_no_scoring_request() -> None:
    """vLLM hands `vllm_xargs` over as they are, to a scheduler and a worker that must live on."""
    for value in ("x", 1, 0.5, ["first"]):
        assert asked_of(SimpleNamespace(extra_args={EXTRA: value})) is None
    assert asked_of(SimpleNamespace(extra_args={EXTRA: {"first": 0}})) == {"first": 0}
    assert asked_of(SimpleNamespace(extra_args=None)) is asked_of(None) is None
