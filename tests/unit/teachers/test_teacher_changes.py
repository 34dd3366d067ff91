"""Servers that come and go while a run goes on; a teacher put to the test."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_teacher import FakeServer, client, logprob

from mopd.config.load import load_config
from mopd.config.schema import Config, DomainConfig, TeacherConfig
from mopd.errors import ConfigError
from mopd.observe.progress import Progress
from mopd.runtime.startup import Startup
from mopd.runtime.teacher_fleet import TeacherFleet
from mopd.runtime.teacher_registry import read_registry, request_change
from mopd.types import Prompt, Rollout, TeacherScore
from mopd_teachers.errors import TeacherError
from mopd_teachers.examination import examine
from mopd_teachers.scores import ScoreItem


def rollouts(step: int) -> list[Rollout]:
    prompt = Prompt("d/0", "d", "?", (4, 5))
    return [Rollout(f"{step}:{i}:0", prompt, (6, i), (-1.0,) * 2, 0, "stop") for i in range(8)]


def test_servers_are_added_and_removed_at_the_next_step_and_it_is_recorded(tmp_path: Path) -> None:
    notes: list[str] = []

    async def step(fleet: TeacherFleet, number: int) -> None:
        scores = await fleet.score(rollouts(number))
        assert all(isinstance(score, TeacherScore) for score in scores.values())
        if fleet._changes.task is not None:
            await fleet._changes.task
        fleet.metrics()

    async def scenario() -> None:
        async with (
            FakeServer("m") as one,
            FakeServer("m") as two,
            FakeServer("m", score=lambda c, t: logprob(c, t) - 3.0 * (t % 2)) as stranger,
        ):
            config = Config(
                teachers={"t": TeacherConfig(endpoints=[one.url], model="m")},
                domains={"d": DomainConfig(teacher="t")},
            )
            fleet = TeacherFleet(
                config, tmp_path / "logs", host="", needed_tokens={"t": 5}, tokenized=[]
            )
            await fleet.start(Startup(lambda waiting: None, notes.append, notes.append))
            (row,) = read_registry(tmp_path)
            assert row["name"] == "t" and row["domains"] == ["d"]
            assert [s["url"] for s in row["servers"]] == [one.url]
            await step(fleet, 0)
            for url in (stranger.url, two.url):
                request_change(tmp_path, {"op": "add", "teacher": "t", "endpoint": url})
            await fleet.score(rollouts(0))  # still the same step
            assert len(read_registry(tmp_path)[0]["servers"]) == 1
            await step(fleet, 1)
            assert [s["url"] for s in read_registry(tmp_path)[0]["servers"]] == [one.url, two.url]
            posts = two.posts
            await step(fleet, 2)
            assert two.posts > posts
            request_change(tmp_path, {"op": "remove", "teacher": "t", "endpoint": one.url})
            await step(fleet, 3)
            posts = one.posts
            await step(fleet, 4)
            assert one.posts == posts
            assert [s["url"] for s in read_registry(tmp_path)[0]["servers"]] == [two.url]
            # The last one stays.
            request_change(tmp_path, {"op": "remove", "teacher": "t", "endpoint": two.url})
            await step(fleet, 5)
            await fleet.close()

    asyncio.run(scenario())
    lines = (tmp_path / "logs" / "teacher-changes.jsonl").read_text().splitlines()
    outcomes = [json.loads(line)["outcome"] for line in lines]
    assert "expected servers of one model" in outcomes[0] and "refused" in outcomes[0]
    assert "serves t, too" in outcomes[1] and "no server of t any more" in outcomes[2]
    assert "only server" in outcomes[3]
    assert len([n for n in notes if n.startswith("teachers ")]) == 4


RUN = """
name: changing
student: {{model: {base}}}
rollout: {{max_response_tokens: 8}}
teachers: {{t: {{endpoints: ["{url}"], model: m}}}}
domains: {{d: {{teacher: t, prompts: {{task: spell_backward}}}}}}
train: {{steps: 10, prompts_per_step: 4}}
"""


def other_scores(context: list[int], token: int) -> float:
    """Another model: whole nats apart."""
    return logprob(context, token) - 3.0 * (token % 2)


def test_a_new_teacher_takes_a_domain_over_and_gives_it_back(tmp_path: Path) -> None:
    demo = Path(__file__).parents[3] / "demo/models"
    samples = {f"{step}": rollouts(step) for step in range(12)}

    async def scenario() -> None:
        async with FakeServer("m") as old, FakeServer("n", score=other_scores) as new:
            (tmp_path / "run.yaml").write_text(RUN.format(base=demo / "base", url=old.url))
            config = load_config([tmp_path / "run.yaml"])
            fleet = TeacherFleet(
                config, tmp_path / "logs", host="", needed_tokens={"t": 5}, tokenized=[]
            )
            await fleet.start(Startup(lambda waiting: None, lambda text: None, lambda text: None))

            async def whose(step: int) -> str:
                scores = await fleet.score(samples[str(step)])
                if fleet._changes.task is not None:
                    await fleet._changes.task
                fleet.metrics()
                found = set()
                for rollout in samples[str(step)]:
                    score = scores[rollout.sample_id]
                    assert isinstance(score, TeacherScore)
                    plain = [logprob([4, 5], 6), logprob([4, 5, 6], rollout.response_ids[1])]
                    tuned = [other_scores([4, 5], 6),
                             other_scores([4, 5, 6], rollout.response_ids[1])]  # fmt: skip
                    assert list(score.logprobs) in (plain, tuned)
                    if plain != tuned:
                        found.add("t" if list(score.logprobs) == plain else "u")
                (name,) = found
                return name

            def asked(**request: Any) -> None:
                request_change(tmp_path, {"op": "add", "teacher": "u", "domain": "d"} | request)

            assert await whose(0) == "t"
            asked(endpoint=new.url, model="another name")
            asked(model=str(demo / "nothing"))
            asked(endpoint=new.url, model="n")
            assert await whose(1) == "t"  # it is being asked meanwhile
            assert await whose(2) == "u" == await whose(3)
            rows = {row["name"]: row["domains"] for row in read_registry(tmp_path)}
            assert rows == {"t": [], "u": ["d"]}
            assert config.domains["d"].teacher == "t" and "u" not in config.teachers
            # The configured one is still asked by name, about held-out answers.
            mine = await fleet.score(samples["3"], teacher="t")
            assert mine["3:1:0"].logprobs[0] == logprob([4, 5], 6)  # type: ignore[union-attr]
            with pytest.raises(ConfigError, match="has a teacher 'u' already"):
                asked(endpoint=new.url)
            with pytest.raises(ConfigError, match=r"no domain 'dd'; did you mean 'd'\?"):
                asked(teacher="v", domain="dd", endpoint=new.url)
            request_change(tmp_path, {"op": "remove", "teacher": "t", "endpoint": None})
            request_change(tmp_path, {"op": "remove", "teacher": "u", "endpoint": None})
            assert await whose(4) == "u"
            posts = new.posts
            assert await whose(5) == "t"
            assert new.posts == posts
            assert [row["name"] for row in read_registry(tmp_path)] == ["t"]
            asked(endpoint=new.url, model="n")
            await whose(6)
            assert await whose(7) == "u"
            await fleet.close()

            # The run that goes on has the configured one again, and keeps that it has, once.
            progress = Progress(10, ["d"], plain=True, file=io.StringIO())
            progress.keep_warnings(tmp_path / "warnings.jsonl")
            for _ in range(2):
                fleet = TeacherFleet(
                    config, tmp_path / "logs", host="", needed_tokens={"t": 5}, tokenized=[]
                )
                await fleet.start(Startup(progress.waiting, progress.note, progress.warn))
                assert await whose(8) == "t"
                await fleet.close()
            warnings = (tmp_path / "warnings.jsonl").read_text().splitlines()
            kept = [json.loads(line)["text"] for line in warnings]
            (warning,) = [text for text in kept if "was added" in text]
            assert warning.startswith("u, which was added") and "d any more, but t" in warning

    asyncio.run(scenario())
    lines = (tmp_path / "logs" / "teacher-changes.jsonl").read_text().splitlines()
    outcomes = [json.loads(line)["outcome"] for line in lines]
    assert "expected 'another name'" in outcomes[0]
    assert "teachers.u.model" in outcomes[1] and "cannot score d" in outcomes[1]
    assert outcomes[2] == "u scores d from the next step on"
    assert "it stays" in outcomes[3] and outcomes[4] == "u scores nothing from the next step on"


def test_a_change_that_cannot_be_meant_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teachers.json cannot be read.*has begun"):
        request_change(tmp_path, {"op": "add", "teacher": "t", "endpoint": "http://a:1"})
    (tmp_path / "logs").mkdir()
    row = {"name": "t", "servers": [{"url": "http://a:1"}], "domains": ["d"]}
    rows = {"time": 0, "teachers": [row]}
    (tmp_path / "logs" / "teachers.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=r"no teacher 'u'; it has \['t'\]"):
        request_change(tmp_path, {"op": "add", "teacher": "u", "endpoint": "http://a:1"})
    with pytest.raises(ConfigError, match=r"no server 'http://b:1'"):
        request_change(tmp_path, {"op": "remove", "teacher": "t", "endpoint": "http://b:1"})


def _by_call() -> Callable[[list[int], int], float]:
    """After the probe (94 tokens), another value at every call: batches then differ."""
    calls = 0

    def score(context: list[int], token: int) -> float:
        nonlocal calls
        calls += 1
        return logprob(context, token) - (0.0 if calls <= 94 else 1e-3 * (calls % 97))

    return score


def test_an_examination_answers_each_question(tmp_path: Path) -> None:
    def right(item: ScoreItem) -> list[float]:
        ids = [*item.prompt_ids, *item.response_ids]
        first = len(item.prompt_ids)
        return [logprob(ids[:t], ids[t]) for t in range(first, len(ids))]

    async def look(server: FakeServer, **options: Any) -> dict[str, bool]:
        async with server, client(server) as teacher:
            findings = await examine(teacher, vocabulary=64, tolerance=1e-4, **options)
            return {finding.what: finding.good for finding in findings}

    good = asyncio.run(look(FakeServer(), reference=right))
    assert len(good) == 9 and all(good.values()), good
    shifted = asyncio.run(look(FakeServer(), reference=lambda i: [*right(i)[1:], -1.0]))
    assert [what for what, fine in shifted.items() if not fine] == ["as the checkpoint itself says"]
    changing = asyncio.run(look(FakeServer(score=_by_call())))
    assert not changing["the same twice"] and not changing["in another order"]
    with pytest.raises(TeacherError, match="lost its weights"):
        asyncio.run(look(FakeServer(score=lambda c, t: -4.0)))
