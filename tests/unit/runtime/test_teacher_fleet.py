"""A server that dies with many batches in flight: one restart, every batch scored again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from mopd.config.schema import Config, DomainConfig, TeacherConfig
from mopd.protocols import TeacherFailed
from mopd.runtime.teacher_fleet import TeacherFleet
from mopd.types import Prompt, Rollout, TeacherScore
from mopd_teachers.client import Endpoint, ScoreItem, TeacherFailure


class Server:
    """Dead until started again; plays the managed server, its actor, the client and the router."""

    def __init__(self) -> None:
        self.up, self.starts = False, 0
        self.actor = self
        self.alive = self
        self.names: list[str] = []

    async def remote(self) -> bool:
        return self.up

    async def start(self) -> Endpoint:
        self.starts += 1
        await asyncio.sleep(0.01)
        self.up = True
        return Endpoint("http://127.0.0.1:1", "t@new")

    async def replace_endpoint(self, index: int, endpoint: Endpoint) -> None:
        self.names.append(str(endpoint.model))

    async def score(
        self, domain: str, items: Sequence[ScoreItem]
    ) -> dict[str, list[float] | TeacherFailure]:
        await asyncio.sleep(0)
        if not self.up:
            return {i.sample_id: TeacherFailure("connection", "refused") for i in items}
        return {i.sample_id: [-1.0] * len(i.response_ids) for i in items}


def test_every_batch_in_flight_is_scored_again_after_one_restart(tmp_path: Path) -> None:
    config = Config(
        teachers={"t": TeacherConfig(model="m")}, domains={"d": DomainConfig(teacher="t")}
    )
    prompt = Prompt("d/0", "d", "?", (1,))

    async def scenario() -> tuple[list[dict[str, tuple[float, ...] | TeacherFailed]], Server]:
        server = Server()
        fleet = TeacherFleet(config, tmp_path, host="127.0.0.1", needed_tokens={}, tokenized=[])
        fleet._router = server  # type: ignore[assignment]
        fleet._managed["t"] = [server]  # type: ignore[list-item]
        fleet._clients["t"] = server  # type: ignore[assignment]
        fleet._restarting["t"], fleet._restarts["t"] = asyncio.Lock(), 0
        batches = [[Rollout(f"s{i}", prompt, (2, 3), (-1.0, -1.0), 0, "stop")] for i in range(4)]
        return [dict(s) for s in await asyncio.gather(*map(fleet.score, batches))], server

    scores, server = asyncio.run(scenario())
    assert scores == [{f"s{i}": TeacherScore((-1.0, -1.0))} for i in range(4)]
    assert server.starts == 1 and server.names == ["t@new"]
