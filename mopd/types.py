"""The data that travels through one training step. All logprobs are natural logs (nats).

    Prompt --rollout--> Rollout --teacher, verifier--> ScoredSample --ORM--> TrainSample

Everything is keyed by an id; nothing is matched by position across processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


def group_of(sample_id: str) -> str:
    """The group (one prompt's samples in one step) that a sample belongs to."""
    return sample_id.rpartition(":")[0]


def finish_reason(said: str | None) -> FinishReason:
    """What an engine said of why an answer ended; anything but an end or the limit is an abort."""
    if said == "stop":
        return "stop"
    return "length" if said == "length" else "abort"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of one domain, e.g. ``Prompt("spell/00042", "spell", "spell: cat\\n", ...)``."""

    id: str
    """Unique within the run: ``DOMAIN/NUMBER``."""
    domain: str
    text: str
    token_ids: tuple[int, ...]
    """[P] ids as the student's tokenizer made them, special tokens included."""
    answer: str | None = None
    """The reference answer, where the domain's verifier wants one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the verifier needs (the JSONL row, the reasoning-gym entry)."""
    difficulty: float | None = None
    """What a curriculum sorts by, larger is harder; None unless ``prompts.difficulty`` names it."""
    stop: tuple[str, ...] = ()
    """Texts at which an answer counts as ended, whatever the model wrote on (evaluation sets)."""
    choices: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """(context ids, continuation ids) of the texts whose likelihoods are compared: such a prompt is
    never answered; its ``token_ids`` are the longest context with its continuation."""

    def ended(self, text: str) -> tuple[str, bool]:
        """(the answer up to the first of `stop`, whether one of them was there)."""
        places = [place for each in self.stop if each and (place := text.find(each)) >= 0]
        return (text[: min(places)], True) if places else (text, False)


@dataclass(frozen=True, slots=True)
class TopK:
    """K candidate tokens at each of R positions, with someone's logprobs of them."""

    ids: Any
    """[R, K] int32 numpy array; -1 is a slot without a token."""
    logprobs: Any
    """[R, K] float32 numpy array, nats; 0 at slots without a token."""


@dataclass(frozen=True, slots=True)
class TeacherScore:
    """What one teacher says of one answer."""

    logprobs: tuple[float, ...]
    """[R] log T of each sampled id."""
    topk: TopK | None = None
    """The teacher's logprobs of its own top-k, or of the sampler's; None if not asked for."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer, as the rollout engine returned it."""

    sample_id: str
    """``STEP:PROMPT_ID:K``, unique within the run."""
    prompt: Prompt
    response_ids: tuple[int, ...]
    """[R] sampled ids, the end-of-sequence id included when it was sampled."""
    sampler_logprobs: tuple[float, ...]
    """[R] log mu of each sampled id under the distribution it was drawn from (temperature in)."""
    weight_version: int
    """Version of the student's weights that drew it."""
    finish_reason: FinishReason
    topk: TopK | None = None
    """The sampler's own top-k at each position, where the objective wants it."""
    routed_experts: Any = None
    """[P + R - 1, layers, k] array of the experts that each input token went to, where
    `student.routing_replay` wants it; 0 in layers without experts."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the domain's verifier says of one answer."""

    correct: bool
    """Exact match."""
    score: float
    """In [0, 1]; partial credit where the verifier gives it, else 1.0 or 0.0."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A rollout with what its teacher and its verifier said; ``None`` where one of them failed."""

    rollout: Rollout
    teacher_logprobs: tuple[float, ...] | None
    """[R] log T of each sampled id by the domain's teacher, or None if scoring failed."""
    verdict: Verdict | None
    """None when the domain has no verifier or the verifier failed (see ``failures``)."""
    failures: tuple[str, ...] = ()
    """Causes, e.g. ``("teacher: timeout",)``; counted in the metrics."""
    teacher_topk: TopK | None = None
    """Candidates with the teacher's logprobs, where the objective wants them."""
    reference_logprobs: tuple[float, ...] | None = None
    """[R] of the reference policy, where the objective has one that is not the teacher."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """What the student trains on: one live sample with every number its loss needs."""

    sample_id: str
    domain: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    teacher_logprobs: tuple[float, ...] | None
    """None only where the objective has no distillation part."""
    orm_advantage: float = 0.0
    """alpha_domain * A_ORM of the sample's own group; 0 where there is no verdict."""
    weight: float = 1.0
    """Of the sample's domain in the loss (balance between domains)."""
    reward: float | None = None
    """Where a critic makes advantages of it: the outcome reward; None without a verdict."""
    reward_weight: float = 0.0
    """alpha_domain of that reward's advantages."""
    reference_logprobs: tuple[float, ...] | None = None
    teacher_topk: TopK | None = None
    sampler_topk: TopK | None = None
    routed_experts: Any = None
    """The rollout's, [P + R - 1, layers, k]; replayed in training."""


@dataclass(frozen=True, slots=True)
class UpdateProof:
    """What a rollout engine says after it took new weights."""

    logprobs: Sequence[Sequence[float]]
    """[R] at temperature 1 of each probe sequence's response ids, under the new weights."""
    load_s: float
    """Seconds until the weights were in."""
    probe_s: float
    """And until the logprobs were there."""
    direct: bool = False
    """Whether the weights were copied straight to their places (`mopd.rollout.direct_load`)."""
