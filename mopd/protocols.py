"""What the training loop asks of its parts. `mopd.build` decides who answers.

Component folders meet here and in `mopd.build`; they never import each other. The parts are
asynchronous because each of them is another process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mopd.types import (
    Prompt,
    Rollout,
    ScoredSample,
    TeacherScore,
    TrainSample,
    UpdateProof,
    Verdict,
)

Verifier = Callable[[Prompt, str], Verdict]
"""(prompt, answer text) -> Verdict. Raises when it cannot judge; a failure is never a 'wrong'."""

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt ids, response ids) pairs."""


class RolloutSource(Protocol):
    """Samples the student."""

    def generate(
        self, requests: Sequence[tuple[str, Prompt]], *, temperature: float, top_k: int = 0
    ) -> AsyncIterator[Sequence[Rollout]]:
        """Yield groups of finished rollouts, in any order, for (sample_id, prompt) requests.

        ``temperature`` 0 is greedy. With ``top_k`` each comes with the sampler's top-k. An id that
        never comes back is a failed rollout.
        """
        ...


class TeacherScorer(Protocol):
    """Scores sampled tokens by the teacher of each sample's own domain."""

    async def score(
        self, rollouts: Sequence[Rollout], *, teacher: str | None = None
    ) -> Mapping[str, TeacherScore | TeacherFailed]:
        """sample id -> the teacher's logprobs of the sampled ids, or why there are none.

        ``teacher``: ask this one for all of them (a reference policy), at the sampled ids only.
        """
        ...


class Judge(Protocol):
    """Runs the domains' verifiers."""

    async def judge(self, rollouts: Sequence[Rollout]) -> Mapping[str, Verdict | VerifierFailed]:
        """sample id -> verdict, or why there is none; domains without a verifier are left out."""
        ...


class TeacherFailed(str):
    """Why a teacher gave no score, in a few words; counted by cause."""


class VerifierFailed(str):
    """Why a verifier gave no verdict, in a few words; counted by cause."""


class Student(Protocol):
    """The trained model, however many ranks it is spread over."""

    async def step(self, samples: Sequence[TrainSample], step: int) -> Mapping[str, float]:
        """One optimizer step on these samples; returns its metrics (global, not per rank)."""
        ...

    async def logprobs(self, sequences: Sequences) -> Sequence[Sequence[float]]:
        """[R] logprobs at temperature 1, over the whole head, of each response's ids."""
        ...

    async def publish(self, path: Path | None, transport: str) -> Mapping[str, int]:
        """Write the weights as one Hugging Face safetensors file, in place of what was there;
        returns tensor name -> fingerprint (`mopd.kernels.word_sums`) of what is trained.

        ``transport``: how, one of ``weight_sync.transport``; those that send to the engines
        themselves have no path.
        """
        ...

    async def save(self, directory: Path) -> None:
        """Write everything the student needs to go on from here."""
        ...

    async def load(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
        ...


class WeightReceiver(Protocol):
    """A rollout engine (or all of them) that can take new weights."""

    async def update_weights(
        self, path: Path | None, version: int, word_sums: Mapping[str, int], probe: Sequences
    ) -> Sequence[UpdateProof]:
        """Load `version`, or take what has been sent; per engine, what it says of the probe then.

        Raises WeightSyncError when names, shapes or fingerprints differ.
        """
        ...

    async def logprobs(self, sequences: Sequences) -> Sequence[Sequence[Sequence[float]]]:
        """Per engine, [R] logprobs at temperature 1 of each response's ids."""
        ...


class WeightSync(Protocol):
    """Brings the student's weights into the rollout engines and proves that they arrived."""

    async def publish(self, version: int) -> Mapping[str, float]:
        """Returns the seconds it took, by part; raises WeightSyncError where they did not arrive.
        The last part of the proof runs on: see `proven`."""
        ...

    async def proven(self) -> Mapping[str, float]:
        """Wait for the proof of what was published last, before anything that was sampled with it
        is used; returns the largest probe disagreement. Raises WeightSyncError past its bound."""
        ...


class Evaluator(Protocol):
    """Scores the student on every domain's held-out prompts."""

    async def evaluate_student(self, step: int) -> Mapping[str, float]:
        """domain -> greedy exact-match accuracy, in [0, 1]."""
        ...


class PromptSource(Protocol):
    """Draws prompts by domain weight; its position is part of a checkpoint."""

    def draw(self, n: int) -> list[Prompt]: ...

    def draw_more(self, domain: str, n: int) -> list[Prompt]:
        """Further prompts of one domain, beside its share."""
        ...

    def record(self, prompt_id: str, passed: int, judged: int) -> None:
        """How many of a prompt's judged answers were right."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the sampling rules are doing."""
        ...

    def take_warnings(self) -> list[str]:
        """What the user should be told since the last call."""
        ...


class Observer(Protocol):
    """Whoever watches the run: display, metrics files, transcripts."""

    def stage(self, name: str) -> None:
        """What is being worked on or waited for now."""
        ...

    def step(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[ScoredSample]
    ) -> None:
        """Step number `step` (the first is 1) is done."""
        ...

    def warn(self, text: str) -> None: ...
