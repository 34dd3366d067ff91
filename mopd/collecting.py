"""One step's answers: sampled, scored by each domain's own teacher, judged by its verifier.

Scores and verdicts are taken while other samples are still being drawn. What fails is counted by
cause; past the configured budget the step ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.config.objective_needs import needs_teacher, sampler_top_k
from mopd.config.schema import Config
from mopd.credit import reward_of
from mopd.errors import FailureBudgetError
from mopd.objective.orm import zero_variance_groups
from mopd.protocols import Judge, PromptSource, RolloutSource, TeacherScorer, VerifierFailed
from mopd.step_metrics import StageTimer
from mopd.types import Prompt, Rollout, ScoredSample, TeacherScore, group_of


@dataclass(kw_only=True)
class Answering:
    """Whom a step asks for answers, scores and verdicts."""

    prompts: PromptSource
    rollouts: RolloutSource
    teachers: TeacherScorer
    judge: Judge
    refuse: Callable[[Rollout], str | None] = lambda _: None
    """Why a rollout cannot be trained on, or None."""


@dataclass
class Batch:
    """One step's answers."""

    scored: list[ScoredSample]
    """What the step trains on."""
    judged: list[ScoredSample]
    """Every answer that was drawn, those of replaced groups too."""
    counts: Counter[str]
    """Failures by cause."""
    requested: int
    """Samples asked for."""
    rounds: int = 0
    """Extra rounds of dynamic sampling."""
    replaced: int = 0
    """Groups that an extra round replaced."""

    def metrics(self) -> dict[str, float]:
        """Failures as a share of the samples asked for, and by cause; dynamic sampling's work."""
        metrics = {f"failures/{cause}": float(n) for cause, n in self.counts.items()}
        metrics["failures/fraction"] = sum(self.counts.values()) / max(self.requested, 1)
        if self.rounds:
            metrics["sampling/rounds"] = float(self.rounds)
            metrics["sampling/replaced_groups"] = float(self.replaced)
        return metrics


async def collect_step(
    parts: Answering, step: int, prompts: Sequence[Prompt], config: Config, timer: StageTimer
) -> Batch:
    """The step's answers; with dynamic sampling (DAPO), groups whose rewards are all equal are
    replaced by answers to fresh prompts of the same domains, for a bounded number of rounds.

    What is still equal after the last round stays. Raises FailureBudgetError as soon as a round
    loses too much.
    """
    per_prompt = config.train.samples_per_prompt
    batch = Batch([], [], Counter(), 0)
    fresh = list(prompts)
    slots = {place: place for place in range(len(fresh))}
    for round_number in range(1 + config.train.sampling.dynamic_rounds):
        requests = sample_requests(step, fresh, per_prompt, batch.requested // per_prompt)
        scored, counts = await collect(parts, requests, config, timer)
        batch.scored += scored
        batch.judged += scored
        batch.counts += counts
        batch.requested += len(requests)
        require_within_budget(step, batch.requested, batch.counts, config)
        if round_number == config.train.sampling.dynamic_rounds:
            break
        rewards = [reward_of(sample, config.objective.orm.reward) for sample in batch.scored]
        groups = [group_of(sample.rollout.sample_id) for sample in batch.scored]
        domain_of = {group_of(s.rollout.sample_id): s.rollout.prompt.domain for s in batch.scored}
        flat = zero_variance_groups(rewards, groups)
        fresh, replaced = [], []
        for name in config.domains:
            own = [group for group in domain_of if group in flat and domain_of[group] == name]
            more = parts.prompts.draw_more(name, len(own)) if own else []
            fresh += more
            replaced += own[: len(more)]  # a domain may have too few prompts left
        if not fresh:
            break
        for number, group in enumerate(replaced):  # fresh answers take the places of the old ones
            slots[batch.requested // per_prompt + number] = slots[place_of(group)]
        batch.scored = [s for s in batch.scored if group_of(s.rollout.sample_id) not in replaced]
        batch.rounds += 1
        batch.replaced += len(replaced)
    # So that a part of the step (train.minibatches) has every domain's share, as it was drawn.
    batch.scored.sort(key=lambda s: slots[place_of(group_of(s.rollout.sample_id))])
    return batch


def sample_requests(
    step: int, prompts: Sequence[Prompt], samples_per_prompt: int, first_place: int = 0
) -> list[tuple[str, Prompt]]:
    """(sample id, prompt) for every sample of the step.

    The place in the step is part of the id: a prompt drawn twice in one step (a domain smaller
    than its share) makes two groups, whose samples must not share an id.
    """
    return [
        (f"{step}:{place}:{prompt.id}:{k}", prompt)
        for place, prompt in enumerate(prompts, first_place)
        for k in range(samples_per_prompt)
    ]


def place_of(group: str) -> int:
    """The place in the step that a group was drawn for."""
    return int(group.split(":")[1])


async def collect(
    parts: Answering,
    requests: Sequence[tuple[str, Prompt]],
    config: Config,
    timer: StageTimer,
) -> tuple[list[ScoredSample], Counter[str]]:
    """Sample, score and judge. Scoring of the first answers runs while the last are drawn.

    Returns the samples in the order of `requests` (so that a run does not depend on which engine
    was faster) and the failures by cause. Rollouts that never came back are only in the count.
    """
    rollouts: dict[str, Rollout | None] = {}  # None: refused, and already counted
    scoring: list[asyncio.Task[Mapping[str, Any]]] = []
    reference: list[asyncio.Task[Mapping[str, Any]]] = []
    judging: list[asyncio.Task[Mapping[str, Any]]] = []
    counts: Counter[str] = Counter()
    temperature, reference_name = config.rollout.temperature, config.objective.kl.reference
    ask_teacher = needs_teacher(config.objective)
    try:
        with timer("generate"):
            async for finished in parts.rollouts.generate(
                requests, temperature=temperature, top_k=sampler_top_k(config.objective)
            ):
                refused = {r.sample_id: why for r in finished if (why := parts.refuse(r))}
                counts.update(f"rollout: {why}" for why in refused.values())
                group = [r for r in finished if r.sample_id not in refused]
                rollouts |= {r.sample_id: r for r in group} | dict.fromkeys(refused)
                if not group:
                    continue
                if ask_teacher:
                    scoring.append(asyncio.ensure_future(parts.teachers.score(group)))
                if reference_name is not None:
                    asked = parts.teachers.score(group, teacher=reference_name)
                    reference.append(asyncio.ensure_future(asked))
                judging.append(asyncio.ensure_future(parts.judge.judge(group)))
        with timer("score"):
            scores = merge(await asyncio.gather(*scoring))
            references = merge(await asyncio.gather(*reference))
        with timer("judge"):
            verdicts = merge(await asyncio.gather(*judging))
    finally:
        for task in (*scoring, *reference, *judging):
            task.cancel()

    samples = []
    for sample_id, _ in requests:
        if sample_id not in rollouts:
            counts["rollout: lost"] += 1
        rollout = rollouts.get(sample_id)
        if rollout is None:
            continue
        score, verdict = scores.get(sample_id), verdicts.get(sample_id)
        failures = []
        if ask_teacher and not isinstance(score, TeacherScore):
            failures.append(f"teacher: {score or 'no answer'}")
        by_reference = references.get(sample_id)
        if reference_name is not None and not isinstance(by_reference, TeacherScore):
            failures.append(f"teacher {reference_name}: {by_reference or 'no answer'}")
        if isinstance(verdict, VerifierFailed):
            failures.append(f"verifier: {verdict}")
        counts.update(failures)
        samples.append(
            ScoredSample(
                rollout=rollout,
                teacher_logprobs=score.logprobs if isinstance(score, TeacherScore) else None,
                teacher_topk=score.topk if isinstance(score, TeacherScore) else None,
                verdict=None if isinstance(verdict, VerifierFailed) else verdict,
                failures=tuple(failures),
                reference_logprobs=(
                    by_reference.logprobs if isinstance(by_reference, TeacherScore) else None
                ),
            )
        )
    return samples, counts


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Union of id -> value maps."""
    return {key: value for part in parts for key, value in part.items()}


def require_within_budget(step: int, total: int, counts: Counter[str], config: Config) -> None:
    """Stop, with what was lost and why, when a step loses too much."""
    for kind, limit, key in (
        (("rollout", "teacher"), config.failures.max_masked_fraction, "max_masked_fraction"),
        (("verifier",), config.failures.max_verifier_failures, "max_verifier_failures"),
    ):
        lost = {cause: n for cause, n in counts.items() if cause.startswith(kind)}
        if sum(lost.values()) > limit * total:
            causes = "\n  ".join(f"{n} x {cause}" for cause, n in sorted(lost.items()))
            error = FailureBudgetError(
                f"step {step + 1}: {sum(lost.values())} of {total} samples failed, more than "
                f"failures.{key} = {limit:g} allows:\n  {causes}\n"
                "The last checkpoint, if there is one, is intact; mend the cause and go on with "
                "resume=true."
            )
            error.finished_steps = step
            raise error
