"""Base, teachers and student answer every held-out set, greedily, during a training run.

Whoever answers, the same verifier judges, and the answers are kept in the run directory so that
an interrupted run does not ask again:

    evaluations.jsonl                      one line a model and domain, for the learning curves
    answers/WHO-STEP.json                  every item's result, for the paired intervals
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mopd.errors import ModelError, TeacherError
from mopd.evaluation.items import Answers, ItemResult, item_result
from mopd.protocols import Judge, RolloutSource, VerifierFailed
from mopd.types import Prompt, Rollout, Verdict

TeacherAnswers = Callable[[str, Sequence[tuple[str, Prompt]]], Awaitable[Sequence[Rollout]]]
"""(domain, (request id, prompt) pairs) -> the greedy answers of the domain's teacher."""


class HeldOutEvaluator:
    """Greedy accuracy on held-out prompts, per set.

    Args:
        held_out: set -> prompts never trained on. A set without a verifier is answered too; its
            results say that nothing judged them.
        teacher_answers: asked with the domain whose teacher is meant.
        record: called as ``record(step, who, domain, correct=, score=, n=)`` for every new result,
            with who one of base, teacher, student; writes evaluations.jsonl.
        progress: called as ``progress(who, answered, all)`` while answers come in.
        domain_of: set -> the domain that it measures; None: a general set, which has no teacher.
        decode: response ids -> text; None keeps no texts.
    """

    def __init__(
        self,
        held_out: Mapping[str, Sequence[Prompt]],
        rollouts: RolloutSource,
        teacher_answers: TeacherAnswers,
        judge: Judge,
        run_dir: Path,
        record: Callable[..., None],
        progress: Callable[[str, int, int], None] = lambda who, done, total: None,
        domain_of: Callable[[str], str | None] = lambda name: name,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._held_out = held_out
        self._rollouts = rollouts
        self._teacher_answers = teacher_answers
        self._judge = judge
        self._run_dir = run_dir
        self._record_line = record
        self._progress = progress
        self._domain_of, self._decode = domain_of, decode

    async def evaluate_student(self, step: int) -> Mapping[str, float]:
        """Answer with the weights the rollout engines hold now; domain -> exact-match rate.

        Step 0 is the base: the student before its first step.
        """
        await self.student_answers(step)
        answers = self.load("student", step)
        assert answers is not None
        rates = {domain: _mean(r.correct for r in items) for domain, items in answers.items()}
        return {domain: rate for domain, rate in rates.items() if rate is not None}

    async def student_answers(self, step: int) -> Answers:
        """The student's results at `step`; asked only if they are not in the run directory."""
        requests = {
            f"eval:{step}:{prompt.id}": prompt
            for prompts in self._held_out.values()
            for prompt in prompts
        }

        async def ask() -> AsyncIterator[Sequence[Rollout]]:
            async for group in self._rollouts.generate(list(requests.items()), temperature=0.0):
                yield group

        return await self._answers("student", step, requests, ask)

    async def teacher_answers(self) -> Answers:
        """Every teacher on the sets of its own domains; asked only if not in the run directory."""
        requests = {
            f"eval:teacher:{prompt.id}": prompt
            for prompts in self._sets("teacher").values()
            for prompt in prompts
        }

        async def ask() -> AsyncIterator[Sequence[Rollout]]:
            for name, prompts in self._sets("teacher").items():
                domain = self._domain_of(name)
                assert domain is not None
                pairs = [(f"eval:teacher:{prompt.id}", prompt) for prompt in prompts]
                yield await self._teacher_answers(domain, pairs)

        return await self._answers("teacher", 0, requests, ask)

    def _sets(self, who: str) -> Mapping[str, Sequence[Prompt]]:
        """The held-out sets that `who` answers."""
        if who != "teacher":
            return self._held_out
        return {n: p for n, p in self._held_out.items() if self._domain_of(n) is not None}

    async def _answers(
        self,
        who: str,
        step: int,
        requests: Mapping[str, Prompt],
        ask: Callable[[], AsyncIterator[Sequence[Rollout]]],
    ) -> Answers:
        known = self.load(who, step)
        if known is not None:
            return known
        rollouts: dict[str, Rollout] = {}
        outcomes: dict[str, Verdict | VerifierFailed] = {}
        async for group in ask():
            rollouts |= {rollout.sample_id: rollout for rollout in group}
            outcomes |= await self._judge.judge(group)
            self._progress(label_of(who, step), len(rollouts), len(requests))
        missing = [prompt.id for key, prompt in requests.items() if key not in rollouts]
        if missing:
            raise TeacherError(
                f"evaluation of the {who}: {len(missing)} of {len(requests)} held-out prompts got "
                f"no answer, the first is {missing[0]}; nothing was recorded, run it again"
            )
        answers: Answers = {name: [] for name in self._sets(who)}
        for key, prompt in requests.items():
            outcome, rollout = outcomes.get(key), rollouts[key]
            verdict = outcome if isinstance(outcome, Verdict) else None
            text = None if self._decode is None else self._decode(rollout.response_ids)
            answers[prompt.domain].append(item_result(prompt, rollout, verdict, text))
        self._record(who, step, answers)
        return answers

    def _path(self, who: str, step: int) -> Path:
        return self._run_dir / "answers" / f"{who}-{step:06d}.json"

    def load(self, who: str, step: int) -> Answers | None:
        """What was recorded for `who` at `step`, or None.

        Raises:
            ModelError: the record is damaged or is of other held-out prompts than today's.
        """
        path = self._path(who, step)
        if not path.exists():
            return None
        try:
            stored = json.loads(path.read_text())
            answers = {d: [ItemResult(**item) for item in items] for d, items in stored.items()}
        except (ValueError, TypeError) as error:
            raise ModelError(f"{path}: damaged ({error}); remove it to evaluate again") from error
        now = {name: {p.id for p in prompts} for name, prompts in self._sets(who).items()}
        if {d: {item.item_id for item in items} for d, items in answers.items()} != now:
            raise ModelError(
                f"{path}: answers to other held-out prompts than the configuration gives now; "
                "take a new run name, or remove the file to evaluate again"
            )
        return answers

    def _record(self, who: str, step: int, answers: Answers) -> None:
        path = self._path(who, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({d: [asdict(r) for r in v] for d, v in answers.items()}))
        label = label_of(who, step)
        for domain, items in answers.items():
            self._record_line(
                step,
                label,
                domain,
                correct=_mean(item.correct for item in items),
                score=_mean(item.score for item in items),
                n=len(items),
            )
        partial.rename(path)

    def recorded_steps(self) -> list[int]:
        """Steps after which the student was evaluated, in order."""
        files = (self._run_dir / "answers").glob("student-*.json")
        return sorted(int(path.stem.rpartition("-")[2]) for path in files)

    def forget_after(self, step: int) -> None:
        """Drop the student's records past `step`: a resumed run makes those steps anew."""
        for recorded in self.recorded_steps():
            if recorded > step:
                self._path("student", recorded).unlink()


def label_of(who: str, step: int) -> str:
    """The student before its first step is the base."""
    return "base" if (who, step) == ("student", 0) else who


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean over the judged items; None where none was judged (never a score of 0)."""
    judged = [float(value) for value in values if value is not None]
    return sum(judged) / len(judged) if judged else None
