"""The fleet with Ray and a real server: kill -9 while a step's samples are being scored (C12)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mopd.config.schema import Config, DomainConfig, TeacherConfig
from mopd.types import Prompt, Rollout, TeacherScore

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ray_here() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield
    ray.shutdown()


def rollouts(count: int, domains: list[str]) -> list[Rollout]:
    rng = random.Random(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(256) for _ in range(n))

    return [
        Rollout(f"0:{i}:0", Prompt(f"{d}/{i}", d, "?", ids(20)), ids(200), (-1.0,) * 200, 0, "stop")
        for i in range(count)
        for d in [domains[i % len(domains)]]
    ]


def test_kill_minus_9_in_the_middle_of_a_step_loses_no_sample(
    ray_here: None, tmp_path: Path
) -> None:
    from mopd.runtime.startup import Startup
    from mopd.runtime.teacher_fleet import TeacherFleet

    config = Config(
        teachers={
            "caesar": TeacherConfig(model=str(ROOT / "demo/models/teacher_caesar"), retries=1)
        },
        # Two domains share it: their samples go to it together.
        domains={"a": DomainConfig(teacher="caesar"), "b": DomainConfig(teacher="caesar")},
    )
    notes: list[str] = []
    startup = Startup(lambda waiting: None, notes.append, notes.append)
    samples = rollouts(200, ["a", "b"])

    async def scenario() -> tuple[Any, Any, Any]:
        fleet = TeacherFleet(
            config,
            tmp_path,
            host="127.0.0.1",
            needed_tokens={"caesar": 221},
            tokenized=[],
            top_k=4,
        )
        try:
            await fleet.start(startup)
            calm = await fleet.score(samples)
            pid = await fleet._keepers["caesar"].managed[0].pid()
            assert pid is not None
            before = psutil.Process(pid).children(recursive=True)
            # As the loop asks: group by group while others are still drawn.
            groups = [
                asyncio.create_task(fleet.score(samples[i : i + 20])) for i in range(0, 200, 20)
            ]
            await asyncio.sleep(0.15)
            assert not all(group.done() for group in groups), "it must be in the middle of it"
            os.kill(pid, signal.SIGKILL)
            stormy = {k: v for part in await asyncio.gather(*groups) for k, v in part.items()}
            assert not any(p.is_running() and p.status() != "zombie" for p in before)
            return calm, stormy, fleet.metrics()
        finally:
            await fleet.close()

    calm, stormy, metrics = asyncio.run(scenario())
    assert stormy.keys() == calm.keys() == {r.sample_id for r in samples}
    for key, want in calm.items():
        got = stormy[key]
        assert isinstance(got, TeacherScore) and isinstance(want, TeacherScore)
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        assert got.topk is not None and got.topk.ids.shape == (200, 4)
    assert metrics["teacher/caesar/restarts"] == 1 and metrics["teacher/caesar/paused_s"] == 0
    assert metrics["teacher/caesar/servers_up"] == 1
    assert notes == ["teacher caesar: its server has died; restart 1 of 3"]
