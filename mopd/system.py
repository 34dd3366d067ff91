"""The started parts of one run, and what is done with them from the first proof to the report.

prove that engines and ranks hold the same weights -> evaluate base and teachers -> the loop ->
evaluate the student -> report.

They are started in `mopd.starting`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.build import Prepared
from mopd.checkpoints import Checkpoint, CheckpointWriter, find_checkpoints
from mopd.credit import Credit
from mopd.errors import FailureBudgetError
from mopd.evaluating.best_student import BestStudent, StoppedEarly
from mopd.evaluating.training_end import conclude_training
from mopd.evaluation.beforehand import teacher_warnings, verifier_warnings
from mopd.evaluation.evaluators import HeldOutEvaluator
from mopd.evaluation.items import Answers
from mopd.evaluation.report import write_report
from mopd.evaluation.selection import Selection
from mopd.loop import Parts, train
from mopd.observe.metrics import MetricsWriter
from mopd.observe.progress import Progress
from mopd.observe.transcripts import TranscriptWriter
from mopd.protocols import Evaluator, Observer, RolloutSource
from mopd.run_observer import RunObserver
from mopd.runtime.judge_pool import JudgePool
from mopd.runtime.rollout_pool import RolloutPool
from mopd.runtime.student_group import StudentGroup
from mopd.runtime.teacher_fleet import TeacherFleet
from mopd.runtime.teacher_rollouts import TeacherRollouts
from mopd.stopping import LeavableEvaluation, StopOnSignal, StoppedInEvaluation
from mopd.weight_sync.publish import VerifiedWeightSync


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run_dir: Path
    steps: int
    """Finished steps."""
    retention: Mapping[str, Any] | None
    """What retention.json holds; None when the run was stopped before its last step."""
    report: Path | None


class System:
    """The started parts of one run."""

    def __init__(
        self,
        prepared: Prepared,
        progress: Progress,
        run_dir: Path,
        student: StudentGroup,
        engines: RolloutPool,
        teachers: TeacherFleet,
        judge: JudgePool,
    ) -> None:
        self._prepared, self._progress, self._run_dir = prepared, progress, run_dir
        self._config = prepared.config
        self._student, self._engines = student, engines
        self._teachers, self._judge = teachers, judge
        self._sync = VerifiedWeightSync(
            student,
            engines,
            prepared.probe,
            max_logprob_error=self._config.weight_sync.max_logprob_error,
            transport=self._config.weight_sync.transport,
            directory=Path(folder) if (folder := self._config.weight_sync.directory) else None,
        )
        self._checkpoints = CheckpointWriter(
            run_dir,
            student,
            keep=self._config.train.keep_checkpoints,
            beside_training=self._config.student.checkpoint_async,
        )
        self._mixture = prepared.mixture()
        self._recent: Collection[Mapping[str, float]] = ()
        self._credit = Credit(prepared.config)

    def close(self) -> None:
        """Remove what weights left on their way; the processes end with whoever started them."""
        self._sync.close()

    async def run(self, checkpoint: Checkpoint | None, stop: StopOnSignal) -> Outcome:
        """Everything from the first proof of equal weights to the report."""
        config, progress = self._config, self._progress
        first_step = 0 if checkpoint is None else checkpoint.step
        with (
            MetricsWriter(self._run_dir, resume_step=first_step, warn=progress.warn) as metrics,
            TranscriptWriter(self._run_dir, resume_step=first_step, every=5) as transcripts,
        ):
            evaluator = HeldOutEvaluator(
                self._prepared.held_out(),
                self._engines,
                self._teachers.answers,
                self._judge,
                self._run_dir,
                metrics.write_evaluation,
                progress.evaluation,
                self._prepared.domain_of,
                self._prepared.decode,
            )
            evaluator.forget_after(first_step)
            progress.stage("verify weights")
            await self._sync.verify(0)  # ranks and engines have both loaded student.model
            progress.stage("evaluate base and teachers")
            base = await evaluator.student_answers(0)
            teacher = await evaluator.teacher_answers()
            for line in self._first_warnings(base, teacher):
                progress.warn(line)
            if checkpoint is not None:
                progress.stage("resume")
                state = checkpoint.state()
                self._mixture.load_state_dict(state["prompts"])
                self._credit.load_state_dict(state["credit"])
                await self._student.load(checkpoint.student)
                await self._sync.publish(version=first_step)
                await self._sync.proven()

            best = self._best_student(evaluator, base, teacher)
            best.begin(first_step)
            progress.begin(first_step)
            stop.finish_step_first = True
            observer = RunObserver(progress, metrics, transcripts, self._teachers, self._prepared)
            self._recent = observer.recent
            leavable = LeavableEvaluation(best, stop)
            parts = self.parts(leavable, observer, lambda: stop.requested)
            early = False
            try:
                done = await train(parts, config, first_step)
            except (StoppedInEvaluation, StoppedEarly) as stopped:
                done, early = stopped.step, isinstance(stopped, StoppedEarly)
                progress.stage("checkpoint")
                await self._checkpoint(done)
            except Exception as error:
                if isinstance(error, FailureBudgetError):
                    await self._save_finished_steps(error.finished_steps, first_step)
                lost = await self._checkpoints.rescue()
                if lost is not None:
                    progress.warn(lost)
                raise
            if (last := await self._checkpoints.finish()) is not None:
                progress.note(last)
            stop.finish_step_first = False
            finished = early or done == config.train.steps
            if finished:
                progress.stage("evaluate student")
                student = await evaluator.student_answers(done)
        if not finished:
            progress.note(
                f"stopped after step {done} of {config.train.steps}, saved; the same command with "
                "resume=true goes on from there"
            )
            return Outcome(self._run_dir, done, None, write_report(self._run_dir))
        progress.stage("save student")
        await self._student.save_hf(self._run_dir / "student")
        better = best.finish(done, student, early=early)
        if better is not None:
            progress.warn(better)
        retention = await conclude_training(
            self._prepared,
            self._run_dir,
            base=base,
            teacher=teacher,
            student=student,
            rollouts=self._engines,
            teachers=self._teachers,
        )
        return Outcome(self._run_dir, done, retention, write_report(self._run_dir))

    def _best_student(
        self, evaluator: HeldOutEvaluator, base: Answers, teacher: Answers
    ) -> BestStudent:
        config, progress = self._config, self._progress
        return BestStudent(
            evaluator,
            Selection(
                config.evaluation.keep_best,
                config.evaluation.patience,
                self._prepared.domain_sets(),
                base,
                teacher,
            ),
            self._run_dir,
            save=self._student.save_hf,
            warn=progress.warn,
            note=progress.note,
            recent=lambda: list(self._recent),
            weights={name: domain.weight for name, domain in config.domains.items()},
        )

    def _first_warnings(self, base: Answers, teacher: Answers) -> list[str]:
        """What base and teachers say of the run before its first step."""
        domain_of = {name: self._prepared.domain_of(name) for name in base}
        return [
            *teacher_warnings(
                base,
                teacher,
                student_model=self._config.student.model,
                teacher_of={
                    name: None if domain is None else self._config.domains[domain].teacher
                    for name, domain in domain_of.items()
                },
            ),
            *verifier_warnings({"base": base, "teacher": teacher}),
        ]

    def parts(
        self, evaluator: Evaluator, observer: Observer, stop_requested: Callable[[], bool]
    ) -> Parts:
        """What the loop talks to."""
        return Parts(
            prompts=self._mixture,
            rollouts=self._source(),
            teachers=self._teachers,
            judge=self._judge,
            credit=self._credit,
            student=self._student,
            sync=self._sync,
            evaluator=evaluator,
            observer=observer,
            checkpoint=self._checkpoint,
            refuse=self._prepared.refuse,
            stop_requested=stop_requested,
            checkpoint_progress=self._checkpoints.progress,
        )

    def _source(self) -> RolloutSource:
        """Whose answers are trained on."""
        if self._config.rollout.source == "student":
            return self._engines
        domains = self._config.domains.items()
        return TeacherRollouts(
            self._teachers, {name: domain.teacher for name, domain in domains}, self._config.seed
        )

    async def _checkpoint(self, step: int) -> None:
        state = {"prompts": self._mixture.state_dict(), "credit": self._credit.state_dict()}
        await self._checkpoints.save(step, state)

    async def _save_finished_steps(self, step: int, first_step: int) -> None:
        """The run ends in a step that lost too much: keep the `step` steps before it."""
        known = {checkpoint.step for checkpoint in find_checkpoints(self._run_dir)}
        if step == first_step or step in known:
            return
        self._progress.stage("checkpoint")
        try:
            await self._sync.proven()
            self._mixture.take_back()  # credit was not given for them yet
            await self._checkpoint(step)
            await self._checkpoints.finish()
            self._progress.note(f"saved after step {step}; resume=true goes on from there")
        except Exception as error:  # the run ends for another reason, which must be told
            self._progress.warn(f"step {step} could not be saved: {error}")
