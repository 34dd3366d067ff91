"""A run's numbers: ``metrics.jsonl``, ``evaluations.jsonl`` and TensorBoard scalars.

Names of metrics (flat, one ``/`` a level); the live display and the report find them by these:

    domain/NAME/reward          share of the domain's answers that are right   in [0, 1]
    domain/NAME/reverse_kl      mean log pi - log T per token                  nats
    domain/NAME/mask_fraction   tokens that the truncation dropped             in [0, 1]
    domain/NAME/...             anything else by domain
    mask_fraction, loss, grad_norm, lr, samples, tokens                        of the whole step
    time/STAGE_s                seconds: generate, score, judge, train, sync, other; step: all of it
    weight_version, ..._lag     of the weights that drew the samples; steps they are behind
    checkpoint/writing          step of the checkpoint that is being written beside training
    checkpoint/step, .../..._s  one that became whole, and what it took (mopd.checkpoints)
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from mopd.errors import MopdError
from mopd.observe.jsonl import JsonLines

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
_RESERVED = {"step", "time_s"}
logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes a run's numbers as they come; made once by the driver.

    Args:
        run_dir: made if missing.
        resume_step: None for a new run; k when the run goes on from a checkpoint made after step k:
            records of later steps are dropped first, so that nothing is there twice.
        tensorboard: also write scalars under ``run_dir/tensorboard``.
        warn: told of every metric that was NaN or infinite, once a name.

    Raises:
        MopdError: the directory holds another run's metrics, or tensorboardX is missing.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int | None = None,
        tensorboard: bool = True,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._metrics = JsonLines(run_dir / METRICS, resume_step=resume_step)
        self._evaluations = JsonLines(run_dir / EVALUATIONS, resume_step=resume_step)
        self._board = _summary_writer(run_dir / "tensorboard", resume_step) if tensorboard else None
        self._warn = warn
        self._warned: set[str] = set()
        spent_s = max((r.get("time_s") or 0.0 for r in self._metrics.kept), default=0.0)
        self._began = time.monotonic() - spent_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, the part before a resume included."""
        return time.monotonic() - self._began

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One step's metrics: numbers (Python's, numpy's, or tensors of one element) or None."""
        clash = _RESERVED & set(metrics)
        assert not clash, f"metrics may not be called {sorted(clash)}"
        record = {"step": step, "time_s": round(self.elapsed_s, 3), **metrics}
        for name in self._metrics.append(record):
            if name not in self._warned:
                self._warned.add(name)
                self._warn(
                    f"metric {name} was not finite at step {step}; written as null (told once)"
                )
        self._scalars(step, metrics)

    def write_evaluation(
        self,
        step: int,
        who: Literal["base", "teacher", "student"],
        domain: str,
        *,
        correct: float | None,
        score: float | None,
        n: int,
        **extra: Any,
    ) -> None:
        """One model's result on one domain's held-out items; None where nothing could be judged.

        Of several records of one (step, who, domain) the last counts.
        """
        self._evaluations.append(
            {"step": step, "time_s": round(self.elapsed_s, 3), "who": who, "domain": domain,
             "correct": correct, "score": score, "n": n, **extra}
        )  # fmt: skip
        scalars = {"correct": correct, "score": score}
        self._scalars(step, {f"evaluation/{domain}/{who}/{k}": v for k, v in scalars.items()})

    def close(self) -> None:
        """Idempotent."""
        self._metrics.close()
        self._evaluations.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scalars(self, step: int, values: Mapping[str, Any]) -> None:
        if self._board is None:
            return
        for name, value in values.items():
            if value is not None and math.isfinite(float(value)):
                self._board.add_scalar(name, float(value), global_step=step)
        self._board.flush()


def _summary_writer(directory: Path, resume_step: int | None) -> Any:
    """tensorboardX: needs protobuf, numpy and packaging only; imported here, it costs a second."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise MopdError(
            f"TensorBoard scalars need the package tensorboardX, which does not import ({error}). "
            "Run the set-up again."
        ) from error
    purge = None if resume_step is None else resume_step + 1  # TensorBoard hides those steps
    return SummaryWriter(logdir=str(directory), purge_step=purge, flush_secs=10)
