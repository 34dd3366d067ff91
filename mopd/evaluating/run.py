"""`mopd evaluate`: base, teachers, a student and any other model on every held-out set.

models and sets -> fingerprints -> what the cache lacks -> one engine a model, several at a time,
answers judged as they come -> the student's own tokens scored by itself and by its teachers ->
retention.json, evaluation.json, report. When the cache lacks nothing, no process is started.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mopd.build import Prepared
from mopd.config.schema import Config, ParallelConfig
from mopd.evaluating.models import ModelUnderTest, models_under_test
from mopd.evaluating.sources import Source, open_source
from mopd.evaluating.work import SCORED_ITEMS, Sampling, Scores, Work, samplings
from mopd.evaluation.answer_cache import AnswerFile
from mopd.evaluation.answering import (
    RawAnswer,
    answer_key,
    answer_missing,
    missing_keys,
    results_of,
)
from mopd.evaluation.beforehand import teacher_warnings, verifier_warnings
from mopd.evaluation.divergence import held_out_divergence
from mopd.evaluation.fingerprints import sampling_fingerprint, set_fingerprint
from mopd.evaluation.outcome import Evaluated, scored_items, write_outcome
from mopd.evaluation.report import write_report
from mopd.evaluation.retention import stream
from mopd.evaluation.sampled import sampled_entry
from mopd.observe.progress import Progress, duration
from mopd.observe.versions import write_versions
from mopd.protocols import Sequences
from mopd.runtime.cluster import ray_cluster
from mopd.runtime.judge_pool import JudgePool
from mopd.types import Prompt


@dataclass(frozen=True)
class EvaluationOutcome:
    """What an evaluation left."""

    out_dir: Path
    retention: Mapping[str, Any] | None
    """None when no student was evaluated."""
    record: Mapping[str, Any]
    report: Path


def run_evaluation(
    prepared: Prepared,
    progress: Progress,
    out_dir: Path,
    *,
    student: str | None,
    others: Mapping[str, str] | None = None,
) -> EvaluationOutcome:
    """Evaluate everything; see the module's text.

    Args:
        out_dir: where the results go; made if missing.
        student: a Hugging Face folder, or ``URL[#MODEL]`` of an OpenAI-compatible server; None
            evaluates base and teachers alone.
        others: further models by name, the same two forms.

    Raises:
        MopdError: anything wrong that a user can mend. What was answered by then is kept.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    for text in prepared.warnings:
        progress.warn(text)
    models, warnings = models_under_test(prepared, student, others or {})
    for text in warnings:
        progress.warn(text)
    return asyncio.run(_Evaluation(prepared, progress, out_dir, models).run())


class _Evaluation:
    def __init__(
        self,
        prepared: Prepared,
        progress: Progress,
        out_dir: Path,
        models: Sequence[ModelUnderTest],
    ) -> None:
        self._prepared, self._progress, self._out_dir = prepared, progress, out_dir
        self._config = prepared.config
        self._cache = Path(prepared.config.run_dir) / ".evaluations"
        self._samplings = samplings(prepared.config)
        self._files: dict[Path, AnswerFile] = {}
        self._work = [self._open(model) for model in models]
        self._total = sum(len(keys) for w in self._unique() for keys in w.todo.values())
        # Two names of one model (a student that is its teacher) share their answers: in turns.
        self._turns = {w.model.fingerprint: asyncio.Lock() for w in self._work}
        self._answered, self._began = 0, time.monotonic()

    def _open(self, model: ModelUnderTest) -> Work:
        """The model's files in the cache, and what they lack."""
        work = Work(model)
        judged = self._prepared.judged()
        for sampling in self._samplings:
            if sampling.name == "divergence" and model.role != "student":
                continue
            sampled = sampling_fingerprint(sampling.settings)
            work.files[sampling.name] = {
                name: self._shared(
                    AnswerFile(
                        self._cache,
                        (
                            model.fingerprint,
                            set_fingerprint(prompts, judged[name].verifier),
                            sampled,
                        ),
                        {"model": model.where, "set": name, "sampling": dict(sampling.settings)},
                    )
                )
                for name, prompts in model.sets.items()
            }
        self._look(work)
        return work

    def _shared(self, file: AnswerFile) -> AnswerFile:
        return self._files.setdefault(file.path, file)

    def _look(self, work: Work) -> None:
        """Note what the model still lacks."""
        work.todo = {
            sampling.name: missing_keys(work.files[sampling.name], sampling.wanted(work.model.sets))
            for sampling in self._samplings
            if sampling.name in work.files
        }

    def _unique(self) -> list[Work]:
        """One of each model, the student's rather than another of the same."""
        return list({w.model.fingerprint: w for w in reversed(self._work)}.values())

    async def run(self) -> EvaluationOutcome:
        began = time.perf_counter()
        scores = Scores(self._cache)
        if self._total or not self._scored(scores):
            await self._ask(scores)
        else:
            self._progress.note("every answer is in the cache; nothing is asked")
        evaluated = self._evaluated(scores, time.perf_counter() - began)
        for text in self._warnings(evaluated):
            self._progress.warn(text)
        retention = write_outcome(self._out_dir, evaluated)
        write_versions(self._out_dir)
        record = json.loads((self._out_dir / "evaluation.json").read_text())
        return EvaluationOutcome(self._out_dir, retention, record, write_report(self._out_dir))

    # --- asking ---

    async def _ask(self, scores: Scores) -> None:
        """Start what is needed, and fill the cache."""
        config = self._config
        async with AsyncExitStack() as stack:
            self._progress.waiting({"ray"})
            stack.enter_context(ray_cluster(_own_cluster(config)))
            judge = JudgePool(self._prepared.judged(), self._prepared.decode)
            await judge.ready()
            self._progress.waiting(set())
            self._progress.stage("evaluate")
            slots = asyncio.Semaphore(engines_at_once(config))
            tasks = [
                asyncio.ensure_future(self._answer(work, judge, scores, slots))
                for work in self._work
            ]
            try:
                await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise

    async def _answer(
        self, work: Work, judge: JudgePool, scores: Scores, slots: asyncio.Semaphore
    ) -> None:
        """Everything that is wanted of one model."""
        model = work.model
        async with self._turns[model.fingerprint], slots:
            self._look(work)
            to_score = self._to_score(work, scores)
            if not any(work.todo.values()) and not to_score:
                work.done.set()
                return
            began = time.perf_counter()
            source = open_source(model, self._prepared)
            try:
                self._progress.note(f"{model.label}: starting {model.where}")
                await source.start()
                work.cost["start_s"] = time.perf_counter() - began
                asked = time.perf_counter()
                for sampling in self._samplings:
                    if todo := work.todo.get(sampling.name):
                        await answer_missing(
                            model.label,
                            work.files[sampling.name],
                            todo,
                            _asking(source, sampling),
                            judge.judge_texts,
                            self._came,
                        )
                        work.cost["answers"] = work.cost.get("answers", 0) + len(todo)
                work.cost["answering_s"] = time.perf_counter() - asked
                work.cost["engine_s"] = await source.busy_s()
                work.done.set()
                await self._score(work, source, scores)
                work.cost["wall_s"] = time.perf_counter() - began
            finally:
                await source.close()

    def _came(self, new: int) -> None:
        self._answered += new
        elapsed = time.monotonic() - self._began
        left = elapsed * (self._total - self._answered) / max(self._answered, 1)
        # Before some of it is done the start-up is all there is to estimate from.
        known = self._answered > 0.02 * self._total
        eta = f"ETA {duration(left)}" if known else "held-out answers"
        self._progress.evaluation(eta, self._answered, self._total)

    # --- token by token ---

    def _student(self) -> Work | None:
        return next((w for w in self._work if w.model.role == "student"), None)

    def _to_score(self, work: Work, scores: Scores) -> list[tuple[str, str]]:
        """(sampling, domain) of the student's answers that this teacher has still to score."""
        student = self._student()
        if student is None or student.model.folder is None or not student.model.same_tokens:
            return []
        return [
            (sampling, domain)
            for domain, teacher in self._teachers().items()
            if teacher == work.model.label and work.model.scores
            for sampling in ("greedy", "divergence")
            if not scores.has(work, student, sampling, self._prepared.domain_sets()[domain])
        ]

    def _teachers(self) -> dict[str, str]:
        """domain -> its teacher's label."""
        domains = self._config.domains
        return {name: f"teacher {domain.teacher}" for name, domain in domains.items()}

    def _scored(self, scores: Scores) -> bool:
        return not any(self._to_score(work, scores) for work in self._work)

    async def _score(self, work: Work, source: Source, scores: Scores) -> None:
        """Logprobs of the student's tokens by this model, once the student has answered."""
        student = self._student()
        if student is None or not self._to_score(work, scores):
            return
        await student.done.wait()
        for sampling, domain in self._to_score(work, scores):
            for name in self._prepared.domain_sets()[domain]:
                items = scored_items(student.model.sets[name], SCORED_ITEMS)
                answers = student.files[sampling][name].answers
                keys = [answer_key(p.id) for p in items]
                ids = [answers[key].ids for key in keys]
                sequences: Sequences = [
                    (prompt.token_ids, own or ()) for prompt, own in zip(items, ids, strict=True)
                ]
                found = await source.logprobs(sequences)
                values = dict(zip(keys, found, strict=True))
                scores.put(work, student, sampling, name, values)

    # --- what came out ---

    def _evaluated(self, scores: Scores, wall_s: float) -> Evaluated:
        prepared, config = self._prepared, self._config
        results = {
            w.model.label: {
                name: results_of(w.files["greedy"][name], prompts)
                for name, prompts in w.model.sets.items()
            }
            for w in self._work
        }
        divergence, tokens = self._divergence(scores)
        labels = self._teachers()
        return Evaluated(
            prompts=prepared.held_out(),
            domain_sets=prepared.domain_sets(),
            general=list(config.evaluation.general),
            teacher_of={d: t for d, t in labels.items() if t in results},
            results=results,
            replicates=config.evaluation.bootstrap,
            seed=config.evaluation.seed,
            majority=prepared.majority(),
            divergence=divergence,
            tokens=tokens,
            sampled=self._sampled(),
            about={
                "models": {w.model.label: w.model.describe() for w in self._work},
                "settings": {s.name: dict(s.settings) for s in self._samplings},
                "cost": self._cost(wall_s),
            },
        )

    def _cost(self, wall_s: float) -> dict[str, Any]:
        """Seconds by model; of the time between an engine's start and its last verdict, the share
        in which vLLM itself was generating."""
        models = {w.model.label: w.cost for w in self._work if w.cost}
        answering = sum(c.get("answering_s", 0.0) for c in models.values())
        engine = sum(c.get("engine_s", 0.0) for c in models.values())
        return {
            "wall_s": wall_s,
            "answers_asked": self._total,
            "models": models,
            "engine_share": engine / answering if self._total and answering > 0 else None,
        }

    def _divergence(
        self, scores: Scores
    ) -> tuple[dict[str, Any], dict[str, tuple[list[str], list[float]]]]:
        """KL by domain on the student's sampled answers; token differences of its greedy ones."""
        student = self._student()
        teachers = {w.model.label: w for w in self._work}
        divergence: dict[str, Any] = {}
        tokens: dict[str, tuple[list[str], list[float]]] = {}
        if student is None:
            return divergence, tokens
        decode = self._prepared.tokenizer.decode
        for domain, label in self._teachers().items():
            sets = self._prepared.domain_sets()[domain]
            teacher = teachers.get(label)
            if teacher is None or not all(
                scores.has(teacher, student, sampling, sets)
                for sampling in ("greedy", "divergence")
            ):
                continue
            pairs = [
                pair
                for s in sets
                for pair in _paired(student, scores.get(teacher, student, "divergence", s), s)
            ]
            divergence[domain] = held_out_divergence(
                [own for own, _ in pairs],
                [theirs for _, theirs in pairs],
                replicates=self._config.evaluation.bootstrap,
                seed=stream(self._config.evaluation.seed, domain),
            )
            for name in sets:
                answers = student.files["greedy"][name].answers
                for key, theirs in scores.get(teacher, student, "greedy", name).items():
                    own = answers[key].logprobs or ()
                    gaps = [t - s for t, s in zip(theirs, own, strict=True)]
                    texts = [decode([token]) for token in answers[key].ids or ()]
                    tokens[key.rpartition("#")[0]] = (texts, gaps)
        return divergence, tokens

    def _sampled(self) -> dict[str, dict[str, Any]]:
        sampling = next((s for s in self._samplings if s.name == "sampled"), None)
        if sampling is None:
            return {}
        evaluation = self._config.evaluation
        found: dict[str, dict[str, Any]] = {}
        for work in self._work:
            found[work.model.label] = {}
            for name, prompts in work.model.sets.items():
                answers = work.files["sampled"][name].answers
                verdicts = {
                    p.id: [answers[answer_key(p.id, k)].correct for k in range(sampling.count)]
                    for p in prompts
                }
                found[work.model.label][name] = sampled_entry(
                    verdicts,
                    evaluation.pass_at,
                    replicates=evaluation.bootstrap,
                    seed=stream(evaluation.seed, name),
                )
        return found

    def _warnings(self, evaluated: Evaluated) -> list[str]:
        results = {m: {s: list(v) for s, v in r.items()} for m, r in evaluated.results.items()}
        teacher = {
            s: results[evaluated.teacher_of[d]][s]
            for d, sets in evaluated.domain_sets.items()
            if d in evaluated.teacher_of
            for s in sets
        }
        names = {s: self._prepared.domain_of(s) for s in teacher}
        return [
            *teacher_warnings(
                results["base"],
                teacher,
                student_model=self._config.student.model,
                teacher_of={s: d and self._config.domains[d].teacher for s, d in names.items()},
            ),
            *verifier_warnings(results),
        ]


def _paired(
    student: Work, theirs: Mapping[str, Sequence[float]], name: str
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """(the student's, the teacher's) logprobs of each sampled answer of a set."""
    answers = student.files["divergence"][name].answers
    return [(answers[key].logprobs or (), values) for key, values in theirs.items()]


def engines_at_once(config: Config) -> int:
    """As many models as the machine has room for: by GPUs where engines take some, else cores."""
    if config.rollout.gpus_per_engine > 0:
        import torch

        return max(1, int(torch.cuda.device_count() / config.rollout.gpus_per_engine))
    return max(1, (os.cpu_count() or 1) // config.rollout.threads_per_engine)


def _own_cluster(config: Config) -> Config:
    """What an evaluation reserves: an engine and the verifiers, none of a run's other processes."""
    student = replace(
        config.student, parallel=ParallelConfig(), gpus_per_rank=0.0, threads_per_rank=1
    )
    return replace(config, student=student, teachers={}, rollout=replace(config.rollout, engines=1))


def _asking(source: Source, sampling: Sampling):  # type: ignore[no-untyped-def]
    async def ask(requests: Sequence[tuple[str, Prompt]]) -> AsyncIterator[Sequence[RawAnswer]]:
        async for group in source.generate(requests, temperature=sampling.temperature):
            yield group

    return ask
