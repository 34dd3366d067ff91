"""The training loop: multi-teacher on-policy distillation on one page.

    draw prompts -> sample the student -> score by each domain's own teacher, judge by its
    verifier (both while other samples are still being drawn) -> advantages -> one
    policy-gradient step -> publish the weights, verified -> now and then evaluate, checkpoint

Source of the algorithm: MiMo-V2-Flash technical report, section 4.4 (MOPD). A step's answers come
together in `mopd.collecting`. Which processes do the work is not known here: see `mopd.protocols`
for what each part must do, `mopd.build` for who does it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from mopd.collecting import Answering, collect_step
from mopd.config.schema import Config
from mopd.credit import Credit
from mopd.protocols import Evaluator, Observer, PromptSource, Student, WeightSync
from mopd.step_metrics import StageTimer, reward_metrics, version_metrics
from mopd.types import ScoredSample


async def no_metrics() -> Mapping[str, float]:
    return {}


@dataclass(kw_only=True)
class Parts(Answering):
    """Everything the loop talks to."""

    credit: Credit
    student: Student
    sync: WeightSync
    evaluator: Evaluator
    observer: Observer
    checkpoint: Callable[[int], Awaitable[None]]
    """Called with the number of finished steps; what is saved may still be written when it
    returns."""
    stop_requested: Callable[[], bool] = lambda: False
    checkpoint_progress: Callable[[], Awaitable[Mapping[str, float]]] = no_metrics
    """Called in every step, while the student has nothing to do; returns how saving went."""


async def train(parts: Parts, config: Config, first_step: int = 0) -> int:
    """Run the steps from `first_step` on; return the number of steps finished.

    Raises:
        FailureBudgetError: more samples of one step failed than the configuration allows.
        WeightSyncError: the rollout engines do not hold the trainer's weights.
    """
    train_config, every = config.train, config.evaluation.every
    for step in range(first_step, train_config.steps):
        timer = StageTimer(parts.observer)
        prompts = parts.prompts.draw(train_config.prompts_per_step)
        batch = await collect_step(parts, step, prompts, config, timer)
        samples, metrics = parts.credit.samples(batch.scored, step)

        with timer("sync"):
            metrics |= await parts.sync.proven()  # the weights that drew these samples
        with timer("train"):
            metrics |= await parts.student.step(samples, step)
        metrics |= await parts.checkpoint_progress()
        with timer("sync"):
            metrics |= await parts.sync.publish(version=step + 1)

        record_verdicts(parts.prompts, batch.judged)
        metrics |= reward_metrics(batch.judged) | batch.metrics() | parts.prompts.metrics()
        if config.rollout.source == "student":
            metrics |= version_metrics(step, batch.scored)
        metrics |= {"samples": float(len(samples))} | timer.metrics()
        parts.observer.step(step + 1, metrics, batch.scored)
        for text in parts.prompts.take_warnings():
            parts.observer.warn(text)

        done = step + 1
        last = done == train_config.steps or parts.stop_requested()
        if every and done % every == 0 and not last:
            await parts.sync.proven()
            parts.observer.stage("evaluate")
            await parts.evaluator.evaluate_student(done)
        if last or (train_config.checkpoint_every and done % train_config.checkpoint_every == 0):
            await parts.sync.proven()
            parts.observer.stage("checkpoint")
            await parts.checkpoint(done)
        if last:
            return done
    return max(first_step, train_config.steps)


def record_verdicts(prompts: PromptSource, judged: Sequence[ScoredSample]) -> None:
    """Tell the prompt source how often each prompt was answered right."""
    verdicts: dict[str, list[bool]] = {}
    for sample in judged:
        if sample.verdict is not None:
            verdicts.setdefault(sample.rollout.prompt.id, []).append(sample.verdict.correct)
    for prompt_id, correct in verdicts.items():
        prompts.record(prompt_id, passed=sum(correct), judged=len(correct))
