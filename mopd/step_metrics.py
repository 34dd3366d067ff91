"""What a step says of itself: rewards by domain, age of the weights, seconds by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mopd.protocols import Observer
from mopd.types import ScoredSample


def reward_metrics(scored: Sequence[ScoredSample]) -> dict[str, float]:
    """Per domain: mean partial-credit score, exact-match rate, share of truncated answers."""
    metrics: dict[str, float] = {}
    for domain in sorted({sample.rollout.prompt.domain for sample in scored}):
        own = [sample for sample in scored if sample.rollout.prompt.domain == domain]
        cut = [sample.rollout.finish_reason == "length" for sample in own]
        metrics[f"domain/{domain}/truncated"] = sum(cut) / len(own)
        verdicts = [sample.verdict for sample in own if sample.verdict is not None]
        if verdicts:
            metrics[f"domain/{domain}/reward"] = sum(v.correct for v in verdicts) / len(verdicts)
            metrics[f"domain/{domain}/score"] = sum(v.score for v in verdicts) / len(verdicts)
    return metrics


def version_metrics(step: int, scored: Sequence[ScoredSample]) -> dict[str, float]:
    """``weight_version``, the oldest weights that drew a sample of the step, and
    ``weight_version_lag``, how many steps they are behind those that it trained."""
    if not scored:
        return {}
    oldest = min(sample.rollout.weight_version for sample in scored)
    return {"weight_version": float(oldest), "weight_version_lag": float(step - oldest)}


@dataclass
class StageTimer:
    """Wall seconds of each stage of one step; tells the observer which stage is running."""

    observer: Observer
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.observer.stage(stage)
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed

    def metrics(self) -> dict[str, float]:
        """``time/STAGE_s``, ``time/step_s`` and ``time/other_s`` (what no stage accounts for)."""
        total = time.perf_counter() - self.started
        return {
            **{f"time/{stage}_s": value for stage, value in self.seconds.items()},
            "time/step_s": total,
            "time/other_s": total - sum(self.seconds.values()),
        }
