"""`mopd teachers add|remove`: heard while a run waits, in any order, and by a run alone."""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_teacher import FakeServer, client, logprob

from mopd.cli import main
from mopd.config.load import load_config
from mopd.config.schema import Config, TeacherConfig
from mopd.errors import ConfigError
from mopd.protocols import TeacherFailed
from mopd.run_dir import LOCK
from mopd.runtime import teacher_keeper
from mopd.runtime.startup import Startup
from mopd.runtime.teacher_fleet import TeacherFleet
from mopd.runtime.teacher_keeper import TeacherKeeper
from mopd.runtime.teacher_registry import goes_on, request_change
from mopd.types import Prompt, Rollout, TeacherScore
from mopd_teachers.errors import TeacherError
from mopd_teachers.replica import Endpoint
from mopd_teachers.scores import ScoreItem
from mopd_teachers.scores import TeacherScore as Score

BASE = Path(__file__).parents[3] / "demo/models/base"
RUN = """
name: heard
student: {{model: {base}}}
rollout: {{max_response_tokens: 8}}
teachers: {{t: {{endpoints: ["{url}"], model: m, retries: 1, pause_s: 20.0, timeout_s: 3.0}}}}
domains: {{d: {{teacher: t, prompts: {{task: spell_backward}}}}}}
train: {{steps: 10, prompts_per_step: 4}}
"""


def rollouts(step: int) -> list[Rollout]:
    prompt = Prompt("d/0", "d", "?", (4, 5))
    return [Rollout(f"{step}:{i}:0", prompt, (6, i), (-1.0,) * 2, 0, "stop") for i in range(4)]


def other(context: list[int], token: int) -> float:
    return logprob(context, token) - 3.0 * (token % 2)


async def started(tmp_path: Path, url: str, notes: list[str]) -> TeacherFleet:
    (tmp_path / "run.yaml").write_text(RUN.format(base=BASE, url=url))
    config: Config = load_config([tmp_path / "run.yaml"])
    fleet = TeacherFleet(config, tmp_path / "logs", host="", needed_tokens={"t": 5}, tokenized=[])
    await fleet.start(Startup(lambda waiting: None, notes.append, notes.append))
    return fleet


def whose(scores: Any) -> str:
    """The teacher that gave the scores of `rollouts`."""
    score = scores[next(key for key in scores if key.endswith(":1:0"))]
    assert isinstance(score, TeacherScore)
    return "t" if score.logprobs[1] == logprob([4, 5, 6], 1) else "u"


def outcomes(tmp_path: Path) -> list[str]:
    lines = (tmp_path / "logs" / "teacher-changes.jsonl").read_text().splitlines()
    return [json.loads(line)["outcome"] for line in lines]


def test_a_server_added_while_the_run_waits_ends_the_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step begins while it waits; a request must not wait for one."""
    monkeypatch.setattr(teacher_keeper, "POLL_S", 0.05)
    notes: list[str] = []

    async def until(text: str) -> None:
        while not any(text in note for note in notes):
            await asyncio.sleep(0.02)

    async def scenario() -> None:
        async with FakeServer("m") as spare:
            async with FakeServer("m") as first:
                fleet = await started(tmp_path, first.url, notes)
                await fleet.score(rollouts(0))
            waiting = asyncio.ensure_future(fleet.score(rollouts(1)))
            await until("none of its servers answers")
            gone = {"op": "remove", "teacher": "t", "endpoint": first.url}
            request_change(tmp_path, gone)
            await until("the run waits for one; add one")
            request_change(tmp_path, {"op": "add", "teacher": "t", "endpoint": f"{spare.url}/"})
            scores = await asyncio.wait_for(waiting, 10)
            assert not any(isinstance(score, TeacherFailed) for score in scores.values())
            request_change(tmp_path, {**gone, "endpoint": f"{first.url}/v1"})
            await fleet.score(rollouts(2))
            await asyncio.wait_for(fleet._changes.task, 5)  # type: ignore[arg-type]
            await fleet.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    told = outcomes(tmp_path)
    assert "add one" in told[0] and "serves t, too" in told[1]
    assert told[2].endswith("is no server of t any more")
    assert any("mopd teachers add" in note for note in notes)


def asked(tmp_path: Path, number: int, **request: Any) -> None:
    """A request as its file says it, two operators' at once for one."""
    folder = tmp_path / "logs" / "teacher-requests"
    folder.mkdir(exist_ok=True)
    (folder / f"{number}.json").write_text(json.dumps({"endpoint": None} | request))


@pytest.mark.parametrize("earlier", [False, True])
def test_a_teacher_added_and_removed_before_a_step_begins_never_scores(
    tmp_path: Path, earlier: bool
) -> None:
    """`earlier`: where another one that was added scores the domain, and leaves with it."""

    async def scenario() -> None:
        async with FakeServer("m") as old, FakeServer("n", score=other) as new:
            fleet = await started(tmp_path, old.url, [])

            async def step(number: int) -> str:
                found = whose(await fleet.score(rollouts(number)))
                if fleet._changes.task is not None:
                    await fleet._changes.task
                return found

            await step(0)
            add = {"op": "add", "endpoint": new.url, "model": "n", "domain": "d"}
            if earlier:
                asked(tmp_path, 0, teacher="before", **add)
                await step(1)
                assert await step(2) == "u"
                asked(tmp_path, 1, teacher="before", op="remove")
            asked(tmp_path, 2, teacher="u", **add)
            asked(tmp_path, 3, teacher="u", op="remove")
            await step(3)
            assert await step(4) == "t" == await step(5)
            assert set(fleet._keepers) == {"t"}
            await fleet.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_requests_left_by_an_earlier_run_are_not_carried_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeServer("m") as server, FakeServer("m") as late:
            (tmp_path / "logs").mkdir()
            asked(tmp_path, 0, op="add", teacher="t", endpoint=late.url)
            fleet = await started(tmp_path, server.url, [])
            await fleet.score(rollouts(0))
            assert fleet._changes.task is None and len(fleet.client("t").servers) == 1
            await fleet.close()

    asyncio.run(scenario())
    assert outcomes(tmp_path) == ["refused: no run was there to carry it out"]


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """As by a process that runs it."""
    with (run_dir / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_nobody_is_asked_where_no_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    row = {"name": "t", "what": "m", "servers": [{"url": "http://a:1", "state": "up"}]}
    registry = {"time": 0, "teachers": [row | {"domains": ["d"]}]}
    (tmp_path / "logs" / "teachers.json").write_text(json.dumps(registry))

    def command(*arguments: str) -> tuple[int, str]:
        code = main(["teachers", *arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    for make in (lambda: None, (tmp_path / LOCK).touch):  # never held; held by nobody any more
        make()
        assert goes_on(tmp_path) is False
        code, said = command("add", str(tmp_path), "t", "--endpoint", "http://b:1")
        assert code == 1 and "no run goes on in" in said
        assert "this run does not go on" in command("list", str(tmp_path))[1]
    with held(tmp_path):
        assert goes_on(tmp_path)
        assert command("add", str(tmp_path), "t", "--endpoint", "http://b:1")[0] == 0
        code, said = command("add", str(tmp_path), "t", "--endpoint", "http://me:pw@b:1")
        assert code == 1 and "a user or a password" in said and "pw@" not in said
        assert "does not go on" not in command("list", str(tmp_path))[1]
    assert len(list((tmp_path / "logs" / "teacher-requests").glob("*.json"))) == 1


def test_a_folder_that_is_not_yours_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    registry = {"time": 0, "teachers": [{"name": "t", "servers": [], "domains": []}]}
    (tmp_path / "logs" / "teachers.json").write_text(json.dumps(registry))
    (tmp_path / "logs" / "teacher-requests").write_text("no folder")
    with pytest.raises(ConfigError, match="cannot be written .* is it your run"):
        request_change(tmp_path, {"op": "add", "teacher": "t", "endpoint": "http://a:1"})


class Restarts:
    """The managed server of a keeper: its restart ends the sickness."""

    def __init__(self, server: FakeServer) -> None:
        self.server, self.starts = server, 0

    async def alive(self) -> bool:
        return True

    async def start(self) -> Endpoint:
        self.starts += 1
        self.server.score = logprob
        return Endpoint(self.server.url, self.server.model)

    async def stop(self) -> None:
        pass


def test_a_server_whose_weights_are_gone_is_restarted() -> None:
    async def scenario() -> None:
        async with FakeServer("m") as server, client(server, retries=0) as teacher:
            await teacher.probe()
            ours: Sequence[Any] = [Restarts(server)]
            config = TeacherConfig(model="m", pause_s=0.0)
            keeper = TeacherKeeper("t", config, teacher, ours, lambda text: None)
            server.score = lambda context, token: -5.56
            items = [ScoreItem(str(i), (1, i), tuple(range(2, 12))) for i in range(4)]
            scores = await keeper.score(items, 0)
            assert all(isinstance(score, Score) for score in scores.values())
            assert ours[0].starts == keeper.restarts == 1
            with pytest.raises(TeacherError, match="has no server"):
                await keeper.remove("http://b:1")

    asyncio.run(scenario())


def test_a_new_teacher_has_the_settings_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token, above all: without it a locked server could not come while a run goes on."""
    monkeypatch.setenv("NEW_KEY", "s3cret")
    seen: list[str | None] = []

    async def look(request: Any, _: Any) -> None:
        seen.append(request.headers.get("Authorization"))

    def added(*settings: str) -> tuple[int, str]:
        where = ["--domain", "d", "--endpoint", url, "--model", "n"]
        code = main(["teachers", "add", str(tmp_path), "u.2", *where, *settings])
        said = capsys.readouterr()
        return code, said.out + said.err

    async def scenario() -> None:
        nonlocal url
        async with FakeServer("m") as old, FakeServer("n", score=other, spoil=look) as new:
            fleet, url = await started(tmp_path, old.url, []), new.url
            await fleet.score(rollouts(0))
            for settings, says in (
                (["gpu=1"], "unknown key 'teachers.new.gpu'; did you mean 'teachers.new.gpus'?"),
                (["timeout_s=soon"], "expected a number"),
                (["model=x"], "model is given by --model"),
            ):
                code, said = added(*settings)
                assert code == 1 and says in said
            assert main(["teachers", "add", str(tmp_path), "t", "timeout_s=5"]) == 1
            assert "go with a new teacher" in capsys.readouterr().err
            assert added("api_key_env=NO_SUCH_KEY")[0] == 0, "whether it is set is the run's to see"
            assert added("api_key_env=NEW_KEY", "timeout_s=7", "retries=0")[0] == 0
            await fleet.score(rollouts(1))
            await fleet._changes.task  # type: ignore[misc]
            new.armed = True
            assert whose(await fleet.score(rollouts(2))) == "u" and seen == ["Bearer s3cret"]
            assert fleet._config.teachers["u.2"].timeout_s == 7.0
            await fleet.close()

    url = ""
    with held(tmp_path):
        asyncio.run(asyncio.wait_for(scenario(), 30))
    told = outcomes(tmp_path)
    assert "'NO_SUCH_KEY' is not set" in told[0] and told[1].startswith("u.2 scores d")
