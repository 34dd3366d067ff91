"""Whoever watches a run's steps: the live display, the metrics files, the transcripts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from mopd.build import Prepared
from mopd.observe.metrics import MetricsWriter
from mopd.observe.progress import Progress
from mopd.observe.transcripts import TranscriptWriter
from mopd.runtime.teacher_fleet import TeacherFleet
from mopd.types import ScoredSample

RECENT_STEPS = 20
"""Of the last steps, whose metrics are kept for whoever looks out for starving domains."""


class RunObserver:
    """The loop's `Observer`: live display, metrics files and transcripts in one."""

    def __init__(
        self,
        progress: Progress,
        metrics: MetricsWriter,
        transcripts: TranscriptWriter,
        teachers: TeacherFleet,
        prepared: Prepared,
    ) -> None:
        self._progress, self._metrics, self._transcripts = progress, metrics, transcripts
        self._teachers, self._prepared = teachers, prepared
        self.recent: deque[Mapping[str, float]] = deque(maxlen=RECENT_STEPS)
        """The last steps' metrics, for whoever looks out for starving domains."""

    def stage(self, name: str) -> None:
        self._progress.stage(name)

    def step(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[ScoredSample]
    ) -> None:
        everything = dict(metrics) | self._teachers.metrics()
        for sample in samples:
            if self._transcripts.wants(step, sample.rollout.prompt.domain):
                self._transcript(step, sample)
        # Last: whoever sees a step's line finds the rest of it written, even of a killed run.
        self._metrics.write(step, everything)
        self.recent.append(everything)
        self._progress.step(step, everything)

    def _transcript(self, step: int, sample: ScoredSample) -> None:
        rollout = sample.rollout
        decode = self._prepared.tokenizer.decode
        # The student as it sampled: one step on-policy, log mu is log pi up to rounding.
        differences = [
            t - s
            for t, s in zip(sample.teacher_logprobs or (), rollout.sampler_logprobs, strict=False)
        ]
        self._transcripts.write(
            step,
            rollout.prompt.domain,
            rollout.sample_id,
            prompt=rollout.prompt.text,
            response=self._prepared.decode(rollout.response_ids),
            correct=None if sample.verdict is None else sample.verdict.correct,
            tokens=[decode([token]) for token in rollout.response_ids],
            teacher_minus_student=differences,
        )

    def warn(self, text: str) -> None:
        self._progress.warn(text)
