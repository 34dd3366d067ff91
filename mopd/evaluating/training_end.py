"""What a finished training run leaves of its evaluation: the same files as `mopd evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mopd.build import Prepared
from mopd.config.teachers import answering
from mopd.evaluating.work import SCORED_ITEMS
from mopd.evaluation.divergence import held_out_divergence
from mopd.evaluation.items import Answers
from mopd.evaluation.metrics import stream
from mopd.evaluation.outcome import Evaluated, sample_records, scored_items, write_outcome
from mopd.protocols import RolloutSource, TeacherFailed, TeacherScorer
from mopd.types import Prompt, Rollout


async def conclude_training(
    prepared: Prepared,
    run_dir: Path,
    *,
    base: Answers,
    teacher: Answers,
    student: Answers,
    rollouts: RolloutSource,
    teachers: TeacherScorer,
) -> Mapping[str, Any]:
    """Write retention, evaluation, samples and final answers; returns the retention.

    The student samples once more, at temperature 1, for its divergence from the teachers, and
    greedily what the browser of answers shows, for the colours of its tokens.

    Args:
        rollouts: engines that hold the final student.
    """
    config = prepared.config
    names = {
        d: f"teacher {answering(config, config.domains[d].teacher)}" for d in prepared.domain_sets()
    }
    by_teacher: dict[str, Answers] = {}
    for name, items in teacher.items():
        domain = prepared.domain_of(name)
        assert domain is not None
        by_teacher.setdefault(names[domain], {})[name] = items
    evaluated = Evaluated(
        prompts=prepared.held_out(),
        domain_sets=prepared.domain_sets(),
        general=list(config.evaluation.general),
        teacher_of=names,
        results={"student": student, "base": base, **by_teacher},
        replicates=config.evaluation.bootstrap,
        seed=config.evaluation.seed,
        majority=prepared.majority(),
        about={"settings": {"greedy": {"temperature": 0.0}}},
    )
    scoring = _Scoring(prepared, rollouts, teachers)
    divergence = {}
    for domain, sets in prepared.domain_sets().items():
        prompts = [p for s in sets for p in scored_items(evaluated.prompts[s], SCORED_ITEMS)]
        pairs = await scoring.pairs(domain, prompts, temperature=1.0)
        divergence[domain] = held_out_divergence(
            [rollout.sampler_logprobs for rollout, _ in pairs],
            [theirs for _, theirs in pairs],
            replicates=config.evaluation.bootstrap,
            seed=stream(config.evaluation.seed, domain),
        )
    evaluated.divergence = divergence
    evaluated.tokens = await _token_gaps(prepared, evaluated, scoring, student)
    retention = write_outcome(run_dir, evaluated)
    assert retention is not None
    return retention


async def _token_gaps(
    prepared: Prepared, evaluated: Evaluated, scoring: _Scoring, student: Answers
) -> dict[str, tuple[list[str], list[float]]]:
    """Item id -> tokens and teacher - student of the answers that the browser will show."""
    shown = {record["id"] for record in sample_records(evaluated)}
    recorded = {item.item_id: item for items in student.values() for item in items}
    decode = prepared.tokenizer.decode
    gaps: dict[str, tuple[list[str], list[float]]] = {}
    for domain, sets in prepared.domain_sets().items():
        prompts = [p for s in sets for p in evaluated.prompts[s] if p.id in shown]
        for rollout, theirs in await scoring.pairs(domain, prompts, temperature=0.0):
            if list(rollout.response_ids) != list(recorded[rollout.prompt.id].response_ids or ()):
                continue  # asked again, a near-tie fell the other way: these are other tokens
            own = rollout.sampler_logprobs
            gaps[rollout.prompt.id] = (
                [decode([token]) for token in rollout.response_ids],
                [t - s for t, s in zip(theirs, own, strict=True)],
            )
    return gaps


class _Scoring:
    """Answers of the student with their teacher's logprobs."""

    def __init__(
        self, prepared: Prepared, rollouts: RolloutSource, teachers: TeacherScorer
    ) -> None:
        self._config = prepared.config
        self._refuse = prepared.refuse
        self._rollouts, self._teachers = rollouts, teachers

    async def pairs(
        self, domain: str, prompts: Sequence[Prompt], *, temperature: float
    ) -> list[tuple[Rollout, Sequence[float]]]:
        """One answer to each prompt with the teacher's logprobs of it; failures are left out."""
        requests = [(f"final:{temperature:g}:{p.id}", p) for p in prompts]
        answers: list[Rollout] = []
        async for group in self._rollouts.generate(requests, temperature=temperature):
            answers += [rollout for rollout in group if not self._refuse(rollout)]
        answers.sort(key=lambda rollout: rollout.sample_id)
        teacher = self._config.domains[domain].teacher
        scores = await self._teachers.score(answers, teacher=teacher)
        pairs: list[tuple[Rollout, Sequence[float]]] = []
        for rollout in answers:
            score = scores.get(rollout.sample_id)
            if score is not None and not isinstance(score, TeacherFailed):
                pairs.append((rollout, score.logprobs))
        return pairs
