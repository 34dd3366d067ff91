"""Publish the student's weights to the rollout engines through a file, and prove the result.

The file lives in shared memory where there is any, so that on one machine no byte touches a
disk. Proof, at every sync: names and shapes are checked by the receiver before anything is
loaded, then trainer and engines score the same fixed sequences and must agree. A model that was
only partly loaded, or that still answers from old weights or an old cache, does not pass.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

from mopd.errors import WeightSyncError
from mopd.protocols import Sequences, Student, WeightReceiver


def make_probe(
    prompts: Sequence[Sequence[int]], count: int, response_tokens: int, vocab: int, seed: int
) -> list[tuple[list[int], list[int]]]:
    """`count` fixed (prompt ids, response ids) pairs: real prompts, then uniformly random ids.

    Random ids visit rare experts and the whole embedding table, which likely text does not.
    """
    rng = random.Random(seed)
    chosen = [list(prompts[rng.randrange(len(prompts))]) for _ in range(count)]
    return [(p, [rng.randrange(vocab) for _ in range(response_tokens)]) for p in chosen]


def largest_difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    """max |a - b| in nats over all tokens; infinite where either is not finite."""
    worst = 0.0
    for row_a, row_b in zip(a, b, strict=True):
        for x, y in zip(row_a, row_b, strict=True):
            difference = abs(x - y)
            # NaN compares false with everything: it must not pass as "no difference".
            worst = difference if not difference <= worst else worst
            if difference != difference:
                return float("inf")
    return worst


class VerifiedWeightSync:
    """One sync: export, load into every engine, compare logprobs on the probe.

    Args:
        max_logprob_error: largest |trainer - engine| allowed on any probe token, nats.
    """

    def __init__(
        self,
        student: Student,
        engines: WeightReceiver,
        probe: Sequences,
        *,
        max_logprob_error: float,
        directory: Path | None = None,
    ) -> None:
        self._student = student
        self._engines = engines
        self._probe = probe
        self._bound = max_logprob_error
        self._directory = directory or transfer_directory()

    async def publish(self, version: int) -> Mapping[str, float]:
        """Bring version `version` into every engine.

        Raises:
            WeightSyncError: names or shapes differ, or the probe's logprobs do.
        """
        path = self._directory / f"mopd-weights-{os.getpid()}-{version}.safetensors"
        started = time.perf_counter()
        trainer: asyncio.Future[Sequence[Sequence[float]]] | None = None
        try:
            await self._student.export(path)
            exported = time.perf_counter()
            # The trainer has nothing else to do while the engines load.
            trainer = asyncio.ensure_future(self._student.logprobs(self._probe))
            await self._engines.update_weights(path, version)
            loaded = time.perf_counter()
            error = await self._compare(version, trainer)
        finally:
            if trainer is not None:
                trainer.cancel()
            path.unlink(missing_ok=True)
        return {
            "sync/probe_error": error,
            "sync/export_s": exported - started,
            "sync/load_s": loaded - exported,
            "sync/probe_s": time.perf_counter() - loaded,
        }

    async def verify(self, version: int) -> float:
        """Largest disagreement on the probe, nats; raises WeightSyncError past the bound."""
        return await self._compare(version, self._student.logprobs(self._probe))

    async def _compare(
        self, version: int, trainer_logprobs: Awaitable[Sequence[Sequence[float]]]
    ) -> float:
        trainer, engines = await asyncio.gather(
            trainer_logprobs, self._engines.logprobs(self._probe)
        )
        worst = 0.0
        for index, engine in enumerate(engines):
            error = largest_difference(trainer, engine)
            worst = max(worst, error)
            if not error <= self._bound:
                raise WeightSyncError(
                    f"rollout engine {index} does not hold weights version {version}: on the "
                    f"probe its logprobs differ from the trainer's by {error:.3g} nats, allowed "
                    f"{self._bound:g} (weight_sync.max_logprob_error). Training on its samples "
                    "would be silently off-policy; the run stops."
                )
        return worst


def transfer_directory() -> Path:
    """Shared memory where the system has it, else the temporary directory."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
