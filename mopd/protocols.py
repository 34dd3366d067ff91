"""What the training loop asks of its parts. `mopd.build` decides who answers.

Component folders meet here and in `mopd.build`; they never import each other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mopd.types import Prompt, Rollout, TrainSample, Verdict

Verifier = Callable[[Prompt, str], Verdict]
"""(prompt, answer text) -> Verdict. Raises when it cannot judge; a failure is never a 'wrong'."""


class RolloutSource(Protocol):
    """Samples the student."""

    def generate(
        self, requests: Sequence[tuple[str, Prompt]], *, temperature: float
    ) -> AsyncIterator[Sequence[Rollout]]:
        """Yield groups of finished rollouts, in any order, for (sample_id, prompt) requests."""
        ...


class TeacherScorer(Protocol):
    """Scores sampled tokens by the teacher of the sample's own domain."""

    async def score(self, rollout: Rollout) -> tuple[float, ...]:
        """[R] teacher logprobs of the sampled ids; raises TeacherError past its retries."""
        ...


class Student(Protocol):
    """The trained model, however many ranks it is spread over."""

    def step(self, samples: Sequence[TrainSample]) -> Mapping[str, float]:
        """One optimizer step on these samples; returns the step's metrics (global, not per rank)."""
        ...

    def logprobs(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], *, temperature: float
    ) -> list[list[float]]:
        """Logprobs of each (prompt, response)'s response ids under the current weights."""
        ...

    def export(self, path: Path) -> Mapping[str, Sequence[int]]:
        """Write the weights as one Hugging Face safetensors file; return name -> shape."""
        ...

    def save(self, directory: Path) -> None:
        """Write everything needed to go on from here."""
        ...

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
        ...


class WeightSync(Protocol):
    """Brings the student's weights into the rollout engines and proves that they arrived."""

    def publish(self, version: int) -> Mapping[str, float]:
        """Returns timings and the largest probe disagreement; raises WeightSyncError."""
        ...


class Evaluator(Protocol):
    """Scores the student on every domain's held-out prompts."""

    def evaluate(self, who: str, step: int) -> Mapping[str, Any]: ...
