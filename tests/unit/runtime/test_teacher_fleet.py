"""Whom a sample is scored by, with which candidates; a server that dies with batches in flight."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd.config.schema import Config, DomainConfig, TeacherConfig
from mopd.runtime import teacher_keeper
from mopd.runtime.teacher_actor import ManagedReplica
from mopd.runtime.teacher_fleet import TeacherFleet
from mopd.runtime.teacher_keeper import TeacherKeeper
from mopd.types import Prompt, Rollout, TeacherScore, TopK
from mopd_teachers.client import Endpoint, Generation, sample_seed
from mopd_teachers.scores import Outcome, ScoreItem
from mopd_teachers.scores import TeacherFailure as Failure
from mopd_teachers.scores import TeacherScore as Score


class Server:
    """Dead until started again; plays the managed server and the client of it."""

    def __init__(self, up: bool = False, value: float = -1.0) -> None:
        self.up, self.starts, self.value = up, 0, value
        self.hangs = self.cannot_start = False
        self.failures_in_a_row, self.last_error, self.refuses_token = 0, "", False
        self.servers = [self]
        self.names: list[str] = []
        self.asked: list[tuple[ScoreItem, int]] = []

    async def alive(self) -> bool:
        return self.up or self.hangs

    async def start(self) -> Endpoint:
        self.starts += 1
        await asyncio.sleep(0.01)
        if self.cannot_start:
            raise OSError("no memory")
        self.up, self.hangs, self.failures_in_a_row = True, False, 0
        return Endpoint("http://127.0.0.1:1", "t@new")

    async def replace_endpoint(self, index: int, endpoint: Endpoint) -> None:
        self.names.append(str(endpoint.model))

    async def revive(self, index: int) -> bool:
        if self.up:
            self.failures_in_a_row = 0
        return self.up

    async def score_batch(
        self, items: Sequence[ScoreItem], *, top_k: int = 0
    ) -> dict[str, Outcome]:
        await asyncio.sleep(0)
        self.asked += [(item, top_k) for item in items]
        if not self.up:
            self.failures_in_a_row += 1
            return {i.sample_id: Failure("connection", "refused") for i in items}
        return {i.sample_id: self._score(i, top_k) for i in items}

    def _score(self, item: ScoreItem, top_k: int) -> Score:
        shape = (len(item.response_ids), top_k)
        own = np.full(shape[0], self.value, np.float32)
        if item.candidate_ids is not None:
            return Score(own, item.candidate_ids, item.candidate_ids * np.float32(-0.5))
        if top_k:
            return Score(own, np.full(shape, 7, np.int32), np.full(shape, -2.0, np.float32))
        return Score(own)


def fleet_of(tmp_path: Path, servers: dict[str, Server], **options: Any) -> TeacherFleet:
    config = Config(
        teachers={name: TeacherConfig(model="m", pause_s=0.0) for name in servers},
        domains={f"d{i}": DomainConfig(teacher=name) for i, name in enumerate(servers)},
    )
    fleet = TeacherFleet(
        config, tmp_path, host="127.0.0.1", needed_tokens={}, tokenized=[], **options
    )
    for name, server in servers.items():
        fleet._keepers[name] = keeper_of(name, server, pause_s=0.0)
    return fleet


def keeper_of(name: str, server: Server, managed: bool = True, **config: Any) -> TeacherKeeper:
    """Its notes are in `.notes`."""
    notes: list[str] = []
    keeper = TeacherKeeper(
        name,
        TeacherConfig(model="m", **config),
        server,  # type: ignore[arg-type]
        [server] if managed else [],  # type: ignore[list-item]
        notes.append,
    )
    keeper.notes = notes  # type: ignore[attr-defined]
    return keeper


def rollout(sample_id: str, domain: str = "d0", topk: TopK | None = None) -> Rollout:
    return Rollout(
        sample_id, Prompt(f"{domain}/0", domain, "?", (1,)), (2, 3), (-1.0, -1.0), 0, "stop", topk
    )


def test_every_batch_in_flight_is_scored_again_after_one_restart(tmp_path: Path) -> None:
    server = Server()

    async def scenario() -> list[Any]:
        fleet = fleet_of(tmp_path, {"t": server})
        batches = [[rollout(f"s{i}")] for i in range(4)]
        return [dict(s) for s in await asyncio.gather(*map(fleet.score, batches))]

    assert asyncio.run(scenario()) == [{f"s{i}": TeacherScore((-1.0, -1.0))} for i in range(4)]
    assert server.starts == 1 and server.names == ["t@new"]


def test_a_named_teacher_scores_samples_of_every_domain_and_no_top_k(tmp_path: Path) -> None:
    one, two = Server(True, -1.0), Server(True, -2.0)
    fleet = fleet_of(tmp_path, {"one": one, "two": two}, top_k=3)
    batch = [rollout("a", "d0"), rollout("b", "d1")]
    named = asyncio.run(fleet.score(batch, teacher="two"))
    assert named == {key: TeacherScore((-2.0, -2.0)) for key in "ab"}
    own = asyncio.run(fleet.score(batch))
    assert [own[key].logprobs[0] for key in "ab"] == [-1.0, -2.0]  # type: ignore[union-attr]
    topk = own["a"].topk  # type: ignore[union-attr]
    assert topk is not None and topk.ids.shape == topk.logprobs.shape == (2, 3)
    assert [k for _, k in one.asked] == [3] and [k for _, k in two.asked] == [0, 0, 3]


def test_the_student_s_top_k_is_what_the_teacher_is_asked_about(tmp_path: Path) -> None:
    server = Server(True)
    fleet = fleet_of(tmp_path, {"t": server}, top_k=2, support="student")
    ids = np.array([[5, -1], [-1, 9]], np.int32)
    sampled = rollout("a", topk=TopK(ids, np.zeros((2, 2), np.float32)))
    score = asyncio.run(fleet.score([sampled]))["a"]
    item, top_k = server.asked[0]
    # An empty slot (-1) goes out as the sampled token and comes back empty.
    assert top_k == 0 and item.candidate_ids is not None
    assert item.candidate_ids.tolist() == [[5, 2], [3, 9]]
    assert isinstance(score, TeacherScore) and score.topk is not None
    assert score.topk.ids.tolist() == ids.tolist()
    assert score.topk.logprobs.tolist() == [[-2.5, 0.0], [0.0, -4.5]]
    # A reference is asked about the sampled tokens alone.
    plain = asyncio.run(fleet.score([sampled], teacher="t"))["a"]
    assert plain == TeacherScore((-1.0, -1.0)) and server.asked[1][0].candidate_ids is None
    with pytest.raises(AssertionError, match="without the student's top-k"):
        asyncio.run(fleet.score([replace(sampled, topk=None)]))


ITEMS = [ScoreItem("s", (1,), (2, 3))]


def test_a_server_that_hangs_is_restarted(tmp_path: Path) -> None:
    server = Server()
    server.hangs = True
    keeper = keeper_of("t", server)
    assert isinstance(asyncio.run(keeper.score(ITEMS, 0))["s"], Score)
    assert server.starts == 1 and keeper.restarts == 1
    assert "hangs" in keeper.notes[0]  # type: ignore[attr-defined]


def test_restarts_are_bounded_then_the_run_pauses_then_samples_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teacher_keeper, "POLL_S", 0.02)
    server = Server()
    server.cannot_start = True
    keeper = keeper_of("t", server, max_restarts=2, pause_s=0.15)

    async def scenario() -> list[Any]:
        both = await asyncio.gather(*(keeper.score(ITEMS, 0) for _ in range(2)))
        return [*both, await keeper.score(ITEMS, 0)]

    for scores in asyncio.run(scenario()):
        failure = scores["s"]
        assert isinstance(failure, Failure) and failure.cause == "connection"
    assert server.starts == keeper.restarts == 2
    assert 0.15 <= keeper.paused_s < 1.0, "one pause, however many batches wait"
    text = "\n".join(keeper.notes)  # type: ignore[attr-defined]
    assert "restart 2 of 2" in text and "the restart failed: no memory" in text
    assert text.count("none of its servers answers") == 1 and "did not come back" in text


def test_a_pause_ends_when_an_external_teacher_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teacher_keeper, "POLL_S", 0.02)
    server = Server()
    keeper = keeper_of("t", server, managed=False, pause_s=30.0)

    async def scenario() -> Any:
        scoring = asyncio.create_task(keeper.score(ITEMS, 0))
        await asyncio.sleep(0.1)
        assert not scoring.done()
        server.up = True
        return await asyncio.wait_for(scoring, 5.0)

    assert isinstance(asyncio.run(scenario())["s"], Score)
    assert server.starts == 0 and 0.0 < keeper.paused_s < 5.0
    assert keeper.notes[-1] == "teacher t: answers again"  # type: ignore[attr-defined]


def test_a_mixture_scores_by_the_weighted_sum_of_its_members(tmp_path: Path) -> None:
    one, two = Server(True, -1.0), Server(True, -3.0)
    fleet = fleet_of(tmp_path, {"one": one, "two": two})
    fleet._config.teachers["blend"] = TeacherConfig(mixture={"one": 0.25, "two": 0.75})
    fleet._config.domains["d0"].teacher = "blend"
    scores = asyncio.run(fleet.score([rollout("a", "d0"), rollout("b", "d1")]))
    assert scores == {"a": TeacherScore((-2.5, -2.5)), "b": TeacherScore((-3.0, -3.0))}
    assert len(two.asked) == 2, "both domains in one batch"
    two.up, two.cannot_start = False, True
    failed = asyncio.run(fleet.score([rollout("c", "d0")]))["c"]
    assert failed == "connection", "never the other member's alone"


def test_a_dead_replica_is_restarted_beside_the_run() -> None:
    """Nothing is lost while the other does its work, and nobody waits for the restart."""
    dead, well = Server(), Server(up=True)
    dead.failures_in_a_row = 3
    well.servers = [dead, well]

    async def scenario() -> tuple[float, int, list[str]]:
        notes: list[str] = []
        config = TeacherConfig(model="m", replicas=2)
        keeper = TeacherKeeper("t", config, well, [dead, well], notes.append)  # type: ignore[arg-type, list-item]
        item = ScoreItem("s", (1,), (2,))
        for _ in range(3):
            assert isinstance((await keeper.score([item], 0))["s"], Score)
        before = well.names[:]  # replace_endpoint was not reached yet
        assert keeper._healing is not None and await keeper._healing
        await keeper.score([item], 0)
        return len(before), dead.starts, notes

    assert asyncio.run(scenario()) == (
        0, 1, ["teacher t (server 0): its server has died; restart 1 of 3"]
    )  # fmt: skip
    assert well.names == ["t@new"]


def test_each_answer_is_asked_for_with_a_seed_of_its_own(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    class Answering(Server):
        async def generate(self, prompts: Sequence[list[int]], **how: Any) -> list[Generation]:
            asked.append(how)
            return [Generation((7,), "stop") for _ in prompts]

    fleet = fleet_of(tmp_path, {"t": Answering(up=True)})
    prompt = Prompt("d0/0", "d0", "?", (1,))
    equal = [("0:0:0", prompt), ("0:0:1", prompt)]
    for seed in (3, 3, 4, None):
        asyncio.run(fleet.answers("d0", equal, temperature=1.0, seed=seed))
    first, again, other, none = (how["seeds"] for how in asked)
    assert first == again == [sample_seed(3, "0:0:0"), sample_seed(3, "0:0:1")]
    assert len({*first, *other}) == 4 and none is None


def test_a_server_that_did_not_start_or_left_keeps_nothing_reserved() -> None:
    """An actor holds its CPUs and GPUs until nobody knows of it."""

    class Stop:
        async def remote(self) -> None:
            pass

    class Actor:
        def __init__(self) -> None:
            self.stop = Stop()

    actor = Actor()
    held = weakref.ref(actor)
    replica = ManagedReplica.__new__(ManagedReplica)
    replica._actor = actor
    del actor

    async def fails() -> Endpoint:
        raise OSError("no memory")

    replica.start = fails  # type: ignore[method-assign]

    async def scenario() -> None:
        with pytest.raises(OSError, match="no memory"):
            await keeper_of("t", Server(up=True)).add(None, lambda: replica)
        assert held() is None
        await replica.stop()  # again, at the run's end
        assert not await replica.alive()

    asyncio.run(scenario())
