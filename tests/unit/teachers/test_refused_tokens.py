"""A token that is refused while a run goes on: as a teacher of which no server answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_teacher import FakeServer, expected

from mopd.config.schema import Config, DomainConfig, TeacherConfig
from mopd.protocols import TeacherFailed
from mopd.runtime import teacher_keeper
from mopd.runtime.startup import Startup
from mopd.runtime.teacher_fleet import TeacherFleet
from mopd.runtime.teacher_registry import read_registry
from mopd.types import Prompt, Rollout, TeacherScore
from mopd_teachers import replica
from mopd_teachers.scores import ScoreItem

CONCURRENCY = 8
ROLLOUTS = [
    Rollout(f"0:{i}:0", Prompt("d/0", "d", "?", (4, 5)), (6, i), (-1.0,) * 2, 0, "stop")
    for i in range(32)
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_keeper, "POLL_S", 0.05)
    monkeypatch.setattr(replica, "REST_S", 0.05)
    monkeypatch.setenv("TEACHER_KEY", "of-yesterday")


async def started(
    tmp_path: Path, notes: list[str], *servers: FakeServer, **teacher: Any
) -> TeacherFleet:
    settings = {"pause_s": 20.0, "api_key_env": "TEACHER_KEY", "concurrency": CONCURRENCY} | teacher
    of = TeacherConfig(endpoints=[s.url for s in servers], model="m", **settings)
    config = Config(teachers={"t": of}, domains={"d": DomainConfig(teacher="t")})
    fleet = TeacherFleet(config, tmp_path / "logs", host="", needed_tokens={"t": 5}, tokenized=[])
    await fleet.start(Startup(lambda waiting: None, notes.append, notes.append))
    return fleet


def assert_scored(scores: Any) -> None:
    for each in ROLLOUTS:
        score, item = scores[each.sample_id], ScoreItem("", (4, 5), each.response_ids)
        assert isinstance(score, TeacherScore) and list(score.logprobs) == expected(item)


@pytest.mark.parametrize(
    ("fast", "vouched", "status"), [(True, True, 401), (False, True, 403), (False, False, 401)]
)
def test_the_run_waits_until_the_token_is_accepted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool, vouched: bool, status: int
) -> None:
    notes: list[str] = []
    if not vouched:  # a plain server is probed again before it is asked
        monkeypatch.setattr(replica, "VOUCH_S", 0.0)

    async def scenario() -> float:
        async with FakeServer("m", fast=fast) as server:
            fleet = await started(tmp_path, notes, server)
            server.refuses = status
            scoring = asyncio.ensure_future(fleet.score(ROLLOUTS))
            while not any("is refused" in note for note in notes):
                await asyncio.sleep(0.01)
            # Those in flight, then a question after each rest (which get longer) and for each look;
            # every sample with its tries would be 96.
            assert server.refused <= CONCURRENCY + 12
            before = server.refused
            await asyncio.sleep(0.5)
            assert not scoring.done() and server.refused - before <= 0.5 / 0.05
            server.refuses = None
            assert_scored(await asyncio.wait_for(scoring, 10))
            paused = fleet.metrics()["teacher/t/paused_s"]
            await fleet.close()
            return paused

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) > 0.4
    (text,) = [note for note in notes if "is refused" in note]
    for part in (
        "teacher t: its token (the value that TEACHER_KEY had when the run began) is refused by",
        "the run waits (0 of 20 s)",
        "mopd teachers add",
        "set TEACHER_KEY, and go on with resume=true",
    ):
        assert part in text
    assert "of-yesterday" not in "".join(notes) and notes[-1] == "teacher t: answers again"


def test_a_run_that_waits_says_at_once_why_that_changed_and_lists_the_server_as_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was restarted with another token: nobody is there, then it refuses."""
    notes: list[str] = []
    monkeypatch.setattr(teacher_keeper, "CHANGED_S", 0.1)

    async def scenario() -> dict[str, Any]:
        async with FakeServer("m") as server:
            fleet = await started(tmp_path, notes, server)
            server.refuses = 503
            scoring = asyncio.ensure_future(fleet.score(ROLLOUTS))
            while not any("none of its servers answers" in note for note in notes):
                await asyncio.sleep(0.01)
            server.refuses = 401
            while not any("is refused" in note for note in notes):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            (row,) = read_registry(tmp_path)
            server.refuses = None
            assert_scored(await asyncio.wait_for(scoring, 10))
            await fleet.close()
            return dict(row["servers"][0])

    listed = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert listed["state"] == "down" and "401" in listed["last_error"]
    assert sum("the run waits" in note for note in notes) <= 4  # one of each reason


def test_past_the_pause_its_samples_are_masked_and_counted(tmp_path: Path) -> None:
    notes: list[str] = []

    async def scenario() -> None:
        async with FakeServer("m") as server:
            fleet = await started(tmp_path, notes, server, pause_s=0.2, api_key_env=None)
            server.refuses = 401
            scores = await fleet.score(ROLLOUTS)
            assert {str(score) for score in scores.values()} <= {"http 401", "down"}
            assert all(isinstance(score, TeacherFailed) for score in scores.values())
            server.refuses = None  # the next step is scored again
            assert_scored(await fleet.score(ROLLOUTS))
            await fleet.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert "its token (none: teachers.t names no api_key_env) is refused by" in "".join(notes)
    assert any("did not come back; its samples are masked" in note for note in notes)


def test_another_server_that_accepts_it_does_the_work(tmp_path: Path) -> None:
    notes: list[str] = []

    async def scenario() -> None:
        async with FakeServer("m") as closed, FakeServer("m", fast=False) as opened:
            fleet = await started(tmp_path, notes, closed, opened)
            closed.refuses = 401
            for _ in range(2):
                assert_scored(await fleet.score(ROLLOUTS))
            assert fleet.metrics()["teacher/t/paused_s"] == 0.0 and closed.refused
            await fleet.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert not notes
