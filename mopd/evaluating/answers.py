"""Every model of an evaluation is asked for what the cache lacks: one engine a model, several at a
time, answers judged as they come, the student's own tokens scored by its teachers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from mopd.build import Prepared
from mopd.config.schema import Config, ParallelConfig
from mopd.config.teachers import answering
from mopd.evaluating.models import ModelUnderTest
from mopd.evaluating.sources import Source, open_source
from mopd.evaluating.work import SCORED_ITEMS, Sampling, Scores, Work
from mopd.evaluation.answer_cache import AnswerFile
from mopd.evaluation.answering import (
    RawAnswer,
    answer_key,
    answer_missing,
    missing_keys,
    results_of,
)
from mopd.evaluation.fingerprints import sampling_fingerprint, set_fingerprint
from mopd.evaluation.items import Answers
from mopd.evaluation.outcome import scored_items
from mopd.observe.progress import Progress
from mopd.observe.wording import duration
from mopd.protocols import Sequences
from mopd.runtime.cluster import ray_cluster
from mopd.runtime.judge_pool import JudgePool
from mopd.runtime.startup import all_of
from mopd.types import Prompt

CHOICES_AT_ONCE = 256
"""Items whose choices are scored in one request; what came is kept after each."""


class Answering:
    """Models and their answers: `fill` asks for what the cache lacks.

    Args:
        models: the student first: its teachers wait for its answers to score them.
        samplings: in which ways they answer.
    """

    def __init__(
        self,
        prepared: Prepared,
        progress: Progress,
        models: Sequence[ModelUnderTest],
        samplings: Sequence[Sampling],
    ) -> None:
        self._prepared, self._progress = prepared, progress
        self._config = prepared.config
        self._cache = Path(prepared.config.run_dir) / ".evaluations"
        self._samplings = samplings
        self.scores = Scores(self._cache)
        self._files: dict[Path, AnswerFile] = {}
        self.work = [self._open(model) for model in models]
        self.asked = sum(len(keys) for w in self._unique() for keys in w.todo.values())
        # Two names of one model (a student that is its teacher) share their answers: in turns.
        self._turns = {w.model.fingerprint: asyncio.Lock() for w in self.work}
        self._answered, self._began = 0, time.monotonic()

    def _open(self, model: ModelUnderTest) -> Work:
        """The model's files in the cache, and what they lack."""
        work = Work(model)
        judged = self._prepared.judged()
        for sampling in self._samplings:
            if sampling.name == "divergence" and not (model.role == "student" and model.scores):
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
        return list({w.model.fingerprint: w for w in reversed(self.work)}.values())

    def results(self) -> dict[str, Answers]:
        """model -> set -> its greedy answers."""
        return {
            w.model.label: {
                name: results_of(w.files["greedy"][name], prompts)
                for name, prompts in w.model.sets.items()
            }
            for w in self.work
        }

    async def fill(self) -> None:
        """Ask for what the cache lacks; where it lacks nothing, no process is started.

        Raises:
            MopdError: a model, server or verifier fails; what was answered by then is kept.
        """
        if not self.asked and not any(self._to_score(work) for work in self.work):
            self._progress.note("every answer is in the cache; nothing is asked")
            return
        config = self._config
        async with AsyncExitStack() as stack:
            self._progress.waiting({"ray"})
            stack.enter_context(ray_cluster(_own_cluster(config)))
            judge = JudgePool(self._prepared.judged(), self._prepared.decode)
            await judge.ready()
            self._progress.waiting(set())
            self._progress.stage("evaluate")
            if self.asked:
                self._progress.evaluation("held-out answers", 0, self.asked)
            slots = asyncio.Semaphore(engines_at_once(config))
            await all_of(self._answer(work, judge, slots) for work in self.work)

    async def _answer(self, work: Work, judge: JudgePool, slots: asyncio.Semaphore) -> None:
        """Everything that is wanted of one model."""
        model = work.model
        async with self._turns[model.fingerprint], slots:
            self._look(work)
            to_score = self._to_score(work)
            if not any(work.todo.values()) and not to_score:
                work.done.set()
                return
            began = time.perf_counter()
            source = open_source(model, self._prepared, self._progress.note)
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
                await self._score(work, source)
                work.cost["wall_s"] = time.perf_counter() - began
            finally:
                await source.close()

    def _came(self, new: int) -> None:
        self._answered += new
        elapsed = time.monotonic() - self._began
        left = elapsed * (self.asked - self._answered) / max(self._answered, 1)
        # Before some of it is done the start-up is all there is to estimate from.
        known = self._answered > 0.02 * self.asked
        eta = f"ETA {duration(left)}" if known else "held-out answers"
        self._progress.evaluation(eta, self._answered, self.asked)

    # --- token by token ---

    def student(self) -> Work | None:
        """The student's work, where one is evaluated."""
        return next((w for w in self.work if w.model.role == "student"), None)

    def _to_score(self, work: Work) -> list[tuple[str, str]]:
        """(sampling, domain) of the student's answers that this teacher has still to score."""
        student = self.student()
        if student is None or "divergence" not in student.files:
            return []
        return [
            (sampling, domain)
            for domain, teacher in self.teachers().items()
            if teacher == work.model.label and work.model.scores
            for sampling in ("greedy", "divergence")
            if not self.scores.has(work, student, sampling, self._prepared.domain_sets()[domain])
        ]

    def teachers(self) -> dict[str, str]:
        """domain -> its teacher's label (of a mixture: its weightiest member's)."""
        config, sets = self._config, self._prepared.domain_sets()
        return {d: f"teacher {answering(config, config.domains[d].teacher)}" for d in sets}

    async def _score(self, work: Work, source: Source) -> None:
        """Logprobs of the student's tokens by this model, once the student has answered."""
        student = self.student()
        if student is None or not self._to_score(work):
            return
        await student.done.wait()
        for sampling, domain in self._to_score(work):
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
                self.scores.put(work, student, sampling, name, values)


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
        chosen_from = [request for request in requests if request[1].choices]
        for start in range(0, len(chosen_from), CHOICES_AT_ONCE):
            yield await weighed(source, chosen_from[start : start + CHOICES_AT_ONCE])
        answered = [request for request in requests if not request[1].choices]
        if answered:
            async for group in source.generate(answered, temperature=sampling.temperature):
                yield group

    return ask


async def weighed(source: Source, requests: Sequence[tuple[str, Prompt]]) -> list[RawAnswer]:
    """The log-likelihood of every choice, nats, as a JSON list: what stands for an answer."""
    rows = await source.logprobs([pair for _, prompt in requests for pair in prompt.choices])
    values = iter([round(math.fsum(row), 6) for row in rows])
    return [
        RawAnswer(key, json.dumps([next(values) for _ in prompt.choices]), None, 0, "stop")
        for key, prompt in requests
    ]
