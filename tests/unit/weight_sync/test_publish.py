"""Verified weight sync: what must stop a run does, with a text that says what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mopd.errors import WeightSyncError
from mopd.protocols import Sequences
from mopd.types import UpdateProof
from mopd.weight_sync.publish import VerifiedWeightSync, largest_difference, make_probe

PROBE = [([1, 2], [3, 4]), ([5], [6, 7])]


class TableStudent:
    """Logprobs come from its one number, `weight`; publishes it as text."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.paths: list[Path] = []

    async def logprobs(self, sequences: Sequences) -> list[list[float]]:
        return [[-self.weight * token for token in response] for _, response in sequences]

    async def publish(self, path: Path, transport: str) -> dict[str, int]:
        path.write_text(str(self.weight))
        self.paths.append(path)
        return {"weight": hash(self.weight)}


class TableEngines:
    """Two engines; `deaf` ones take an update without a word and keep their old weight."""

    def __init__(self, weight: float, deaf: Sequence[int] = ()) -> None:
        self.weights = [weight, weight]
        self.deaf = deaf
        self.versions: list[int] = []

    async def update_weights(
        self, path: Path, version: int, word_sums: Mapping[str, int], probe: Sequences
    ) -> list[UpdateProof]:
        self.versions.append(version)
        for index in range(2):
            if index not in self.deaf:
                self.weights[index] = float(path.read_text())
                assert word_sums == {"weight": hash(self.weights[index])}
        return [UpdateProof(said, 0.25, 0.5) for said in await self.logprobs(probe)]

    async def logprobs(self, sequences: Sequences) -> list[list[list[float]]]:
        return [
            [[-w * token for token in response] for _, response in sequences] for w in self.weights
        ]


def sync(
    student: TableStudent, engines: TableEngines, folder: Path, transport: str = "shared_memory"
) -> VerifiedWeightSync:
    return VerifiedWeightSync(  # type: ignore[arg-type]
        student, engines, PROBE, max_logprob_error=1e-3, transport=transport, directory=folder
    )


def published(publisher: VerifiedWeightSync, version: int) -> dict[str, float]:
    """Publish and prove; the metrics of both."""

    async def both() -> dict[str, float]:
        return {**await publisher.publish(version), **await publisher.proven()}

    return asyncio.run(both())


@pytest.mark.parametrize("transport", ["shared_memory", "file"])
def test_new_weights_arrive_everywhere_and_no_file_is_left(tmp_path: Path, transport: str) -> None:
    student, engines = TableStudent(0.5), TableEngines(0.1)
    publisher = sync(student, engines, tmp_path, transport)
    assert asyncio.run(publisher.proven()) == {}  # nothing was claimed yet
    metrics = published(publisher, 7)
    assert engines.weights == [0.5, 0.5] and engines.versions == [7]
    assert metrics.pop("sync/probe_error") == 0.0
    assert metrics.pop("sync/load_s") == 0.25 and metrics.pop("sync/probe_s") == 0.5
    assert metrics.keys() == {"sync/export_s", "sync/direct"}
    student.weight = 0.75
    published(publisher, 8)
    assert engines.weights == [0.75, 0.75]
    # One file in memory is written again and again; a file that travels is new each time.
    assert len(set(student.paths)) == (1 if transport == "shared_memory" else 2)
    assert student.paths[0].exists() == (transport == "shared_memory")
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_kept_its_old_weights_stops_the_run(tmp_path: Path) -> None:
    student, engines = TableStudent(0.5), TableEngines(0.499, deaf=[1])
    publisher = sync(student, engines, tmp_path)
    with pytest.raises(WeightSyncError, match="rollout engine 1 .* version 3.* 0.007 nats"):
        published(publisher, 3)
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_nobody_publishes_over_a_version_that_was_not_proven(tmp_path: Path) -> None:
    student, engines = TableStudent(0.5), TableEngines(0.499, deaf=[1])
    publisher = sync(student, engines, tmp_path)

    async def twice() -> None:
        await publisher.publish(3)
        await publisher.publish(4)

    with pytest.raises(WeightSyncError, match="version 3"):
        asyncio.run(twice())
    assert engines.versions == [3]


def test_the_trainer_scores_after_the_engines_and_while_they_sample(tmp_path: Path) -> None:
    events: list[str] = []

    class Student(TableStudent):
        async def publish(self, path: Path, transport: str) -> dict[str, int]:
            events.append("published")
            return await super().publish(path, transport)

        async def logprobs(self, sequences: Sequences) -> list[list[float]]:
            events.append("trainer")
            return await super().logprobs(sequences)

    class Engines(TableEngines):
        async def update_weights(self, *given: Any) -> list[UpdateProof]:
            await asyncio.sleep(0.01)
            events.append("loaded")
            return await super().update_weights(*given)

    async def step() -> None:
        publisher = sync(Student(0.5), Engines(0.1), tmp_path)
        await publisher.publish(1)
        events.append("sampling begins")
        await asyncio.sleep(0.01)
        events.append("sampling ends")
        assert await publisher.proven() == {"sync/probe_error": 0.0}
        assert await publisher.proven() == {"sync/probe_error": 0.0}  # of the same version

    asyncio.run(step())
    assert events == ["published", "loaded", "sampling begins", "trainer", "sampling ends"]


def test_an_error_of_the_engines_leaves_no_file(tmp_path: Path) -> None:
    class Engines(TableEngines):
        async def update_weights(self, *given: Any) -> list[UpdateProof]:
            raise WeightSyncError("missing model.norm.weight")

    with pytest.raises(WeightSyncError, match="missing"):
        asyncio.run(sync(TableStudent(0.5), Engines(0.1), tmp_path).publish(1))
    assert list(tmp_path.iterdir()) == []


def test_nan_is_not_agreement(tmp_path: Path) -> None:
    student, engines = TableStudent(0.5), TableEngines(float("nan"), deaf=[0, 1])
    with pytest.raises(WeightSyncError, match="inf nats"):
        published(sync(student, engines, tmp_path), 1)


def test_largest_difference() -> None:
    assert largest_difference([[0.0, -1.0]], [[0.5, -1.0]]) == 0.5
    assert largest_difference([[float("nan")]], [[1.0]]) == float("inf")
    assert largest_difference([[-float("inf")]], [[-float("inf")]]) == float("inf")
    with pytest.raises(ValueError):
        largest_difference([[1.0]], [[1.0, 2.0]])


def test_the_probe_is_fixed_by_its_seed_and_stays_inside_the_vocabulary() -> None:
    prompts = [[1, 2, 3], [4]]
    probe = make_probe(prompts, 5, 16, 10, seed=3)
    assert probe == make_probe(prompts, 5, 16, 10, seed=3) != make_probe(prompts, 5, 16, 10, seed=4)
    assert all(p in prompts and len(r) == 16 and max(r) < 10 for p, r in probe)
