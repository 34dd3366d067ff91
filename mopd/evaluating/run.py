"""`mopd evaluate`: base, teachers, a student and any other model on every held-out set.

models and sets -> fingerprints -> what the cache lacks -> one engine a model, several at a time,
answers judged as they come -> the student's own tokens scored by its teachers ->
retention.json, evaluation.json, report. When the cache lacks nothing, no process is started.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.build import Prepared
from mopd.config.load import save_config
from mopd.evaluating.answers import Answering
from mopd.evaluating.models import models_under_test
from mopd.evaluating.work import Work, samplings
from mopd.evaluation.answering import (
    answer_key,
)
from mopd.evaluation.beforehand import teacher_warnings, verifier_warnings
from mopd.evaluation.divergence import held_out_divergence
from mopd.evaluation.metrics import stream
from mopd.evaluation.outcome import EVALUATION, Evaluated, write_outcome
from mopd.evaluation.record_shapes import Evaluation, read_json
from mopd.evaluation.report import write_report
from mopd.evaluation.run_files import EVALUATION_CONFIG, WARNINGS
from mopd.evaluation.sampled import sampled_entry
from mopd.evaluation.trained import training_of
from mopd.observe.progress import Progress
from mopd.observe.versions import write_versions


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
    save_config(prepared.config, out_dir / EVALUATION_CONFIG)
    progress.keep_warnings(out_dir / WARNINGS)
    for text in prepared.warnings:
        progress.warn(text)
    models, warnings = models_under_test(prepared, student, others or {})
    for text in warnings:
        progress.warn(text)
    answering = Answering(prepared, progress, models, samplings(prepared.config))
    return asyncio.run(_Evaluation(prepared, progress, out_dir, answering).run())


class _Evaluation:
    """What came of the answers."""

    def __init__(
        self, prepared: Prepared, progress: Progress, out_dir: Path, answering: Answering
    ) -> None:
        self._prepared, self._progress, self._out_dir = prepared, progress, out_dir
        self._config = prepared.config
        self._answering = answering
        self._samplings = samplings(prepared.config)

    async def run(self) -> EvaluationOutcome:
        began = time.perf_counter()
        await self._answering.fill()
        evaluated = self._evaluated(time.perf_counter() - began)
        for text in self._warnings(evaluated):
            self._progress.warn(text)
        retention = write_outcome(self._out_dir, evaluated)
        write_versions(self._out_dir)
        record = json.loads((self._out_dir / EVALUATION).read_text())
        return EvaluationOutcome(self._out_dir, retention, record, write_report(self._out_dir))

    def _evaluated(self, wall_s: float) -> Evaluated:
        prepared, config = self._prepared, self._config
        results = self._answering.results()
        divergence, tokens = self._divergence()
        labels = self._answering.teachers()
        return Evaluated(
            prompts=prepared.evaluated(),
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
                "models": self._models(),
                "settings": {s.name: dict(s.settings) for s in self._samplings},
                "cost": self._cost(wall_s),
            },
        )

    def _models(self) -> dict[str, Any]:
        """Where each model is, and what it took to train it where that is known."""
        student = self._answering.student()
        reference = None if student is None else student.model.folder
        found: dict[str, Any] = {}
        for model in (w.model for w in self._answering.work):
            found[model.label] = model.describe()
            if model.role in ("student", "other") and model.folder is not None:
                found[model.label]["training"] = training_of(model.folder, reference)
        return found

    def _cost(self, wall_s: float) -> dict[str, Any]:
        """Seconds by model; of the time between an engine's start and its last verdict, the share
        in which vLLM itself was generating."""
        models = {w.model.label: w.cost for w in self._answering.work if w.cost}
        answering = sum(c.get("answering_s", 0.0) for c in models.values())
        engine = sum(c.get("engine_s", 0.0) for c in models.values())
        now = {
            "wall_s": wall_s,
            "answers_asked": self._answering.asked,
            "models": models,
            "engine_share": engine / answering if self._answering.asked and answering > 0 else None,
        }
        return now | {"earlier": self._earlier_costs()}

    def _earlier_costs(self) -> list[dict[str, Any]]:
        """Of earlier evaluations into this folder, whose answers this one takes from the cache:
        what an evaluation cost is known by all the calls that it took."""
        try:
            record = read_json((self._out_dir / EVALUATION).read_text(encoding="utf-8"), Evaluation)
            before = record["cost"]
        except (OSError, ValueError, KeyError):
            return []  # none, or one that this evaluation puts right
        earlier = [*before.pop("earlier", []), before]
        return [cost for cost in earlier if cost["answers_asked"]]

    def _divergence(
        self,
    ) -> tuple[dict[str, Any], dict[str, tuple[list[str], list[float]]]]:
        """KL by domain on the student's sampled answers; token differences of its greedy ones."""
        student, scores = self._answering.student(), self._answering.scores
        teachers = {w.model.label: w for w in self._answering.work}
        divergence: dict[str, Any] = {}
        tokens: dict[str, tuple[list[str], list[float]]] = {}
        if student is None or "divergence" not in student.files:
            return divergence, tokens
        decode = self._prepared.tokenizer.decode
        for domain, label in self._answering.teachers().items():
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
        for work in self._answering.work:
            found[work.model.label] = {}
            for name, prompts in work.model.sets.items():
                if prompts[0].choices:
                    continue  # nothing is sampled there
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
