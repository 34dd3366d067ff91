"""Publish the student's weights to the rollout engines through a file, and prove the result.

With `shared_memory` the file lies in memory and stays: every rank writes its own part of it in
place, and on one machine no byte touches a disk. With `file` each version is a new one, which rank
0 writes in a folder that all machines see. `nccl` and `ipc` have no file: the ranks send to the
engines (`mopd.rollout.transfer`).

Proof, at every sync: names and shapes are checked by the receiver before anything is loaded;
fingerprints of each tensor, which the ranks make of what they train and the engines of what they
hold, must be the same; then engines and trainer score the same fixed sequences and must agree. A
model that was only partly loaded, or that still answers from old weights or an old cache, does not
pass. The ranks score while the next answers are drawn, when they have nothing else to do; whoever
uses the answers asks `proven` first.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mopd.config.schema import DEVICE_TRANSPORTS
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
    """One sync: publish, load into every engine, compare logprobs on the probe.

    Args:
        max_logprob_error: largest |trainer - engine| allowed on any probe token, nats.
        transport: `weight_sync.transport`.
        directory: where the file goes; None is memory, where there is any to see.
    """

    def __init__(
        self,
        student: Student,
        engines: WeightReceiver,
        probe: Sequences,
        *,
        max_logprob_error: float,
        transport: str = "shared_memory",
        directory: Path | None = None,
    ) -> None:
        self._student = student
        self._engines = engines
        self._probe = probe
        self._bound = max_logprob_error
        self._transport = transport
        self._directory = directory or transfer_directory()
        self._file: Path | None = None
        self._trainer: asyncio.Future[Sequence[Sequence[float]]] | None = None
        self._claim: tuple[int, list[Sequence[Sequence[float]]]] = (0, [])
        self._error: float | None = None

    async def publish(self, version: int) -> Mapping[str, float]:
        """Bring version `version` into every engine. What the trainer says of the probe is still to
        come: `proven` waits for it.

        Raises:
            WeightSyncError: names, shapes or fingerprints differ, or the version before this one
                turns out not to be what the engines held.
        """
        await self.proven()
        started = time.perf_counter()
        path = self._path(version)
        done = False
        try:
            word_sums = await self._student.publish(path, self._transport)
            exported = time.perf_counter()
            proofs = await self._engines.update_weights(path, version, word_sums, self._probe)
            done = True
        finally:
            if not done or self._transport == "file":
                self.close()
        # Only now: beside the engines' work it would take their processor time.
        self._trainer = asyncio.ensure_future(self._student.logprobs(self._probe))
        self._claim = version, [proof.logprobs for proof in proofs]
        return {
            "sync/export_s": exported - started,
            "sync/load_s": max(p.load_s for p in proofs),
            "sync/probe_s": max(p.probe_s for p in proofs),
            "sync/direct": float(all(p.direct for p in proofs)),
        }

    async def proven(self) -> Mapping[str, float]:
        """Returns once trainer and engines are known to agree on the probe; their largest
        disagreement, in nats. Raises WeightSyncError past the bound."""
        if self._trainer is not None:
            trainer, self._trainer = self._trainer, None
            self._error = self._compare(self._claim[0], await trainer, self._claim[1])
        return {} if self._error is None else {"sync/probe_error": self._error}

    async def verify(self, version: int) -> float:
        """Largest disagreement on the probe, nats; raises WeightSyncError past the bound."""
        trainer, engines = await asyncio.gather(
            self._student.logprobs(self._probe), self._engines.logprobs(self._probe)
        )
        self._error = self._compare(version, trainer, engines)
        return self._error

    def close(self) -> None:
        """Remove the file; nothing is waited for."""
        if self._trainer is not None:
            self._trainer.cancel()
            self._trainer = None
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def _path(self, version: int) -> Path | None:
        if self._transport in DEVICE_TRANSPORTS:
            return None
        kept = self._transport == "shared_memory"
        name = f"mopd-weights-{os.getpid()}-{'shared' if kept else version}.safetensors"
        self._file = self._directory / name
        return self._file

    def _compare(
        self,
        version: int,
        trainer: Sequence[Sequence[float]],
        engines: Sequence[Sequence[Sequence[float]]],
    ) -> float:
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
