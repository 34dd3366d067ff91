"""The teachers' own answers in the place of the student's: sequence-level distillation (SeqKD).

What the student then trains on is not its own: with advantage 1 for a right answer and no ratio
(``configs/recipes/seqkd.yaml``) it is supervised fine-tuning on its teachers' right answers, the
baseline that on-policy distillation has to beat. Kim and Rush 2016 (arXiv 1606.07947).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mopd.protocols import TeacherFailed
from mopd.types import Prompt, Rollout, TeacherScore

AT_ONCE = 32
"""Answers scored together: few enough that scoring and judging begin while others are sampled."""


class AnsweringTeachers(Protocol):
    """The part of `TeacherFleet` that is asked here."""

    async def answers(
        self,
        domain: str,
        requests: Sequence[tuple[str, Prompt]],
        *,
        temperature: float,
        seed: int | None,
    ) -> Sequence[Rollout]: ...

    async def score(
        self, rollouts: Sequence[Rollout], *, teacher: str | None
    ) -> Mapping[str, TeacherScore | TeacherFailed]: ...


class TeacherRollouts:
    """`mopd.protocols.RolloutSource` that asks each prompt's own teacher.

    Args:
        teacher_of: domain -> its teacher.
        seed: the run's; a sample's answer depends on it and on the sample's id alone.
    """

    def __init__(
        self, teachers: AnsweringTeachers, teacher_of: Mapping[str, str], seed: int
    ) -> None:
        self._teachers, self._teacher_of, self._seed = teachers, teacher_of, seed

    async def generate(
        self, requests: Sequence[tuple[str, Prompt]], *, temperature: float, top_k: int = 0
    ) -> AsyncIterator[Sequence[Rollout]]:
        """Groups of answers, each with its teacher's logprobs as those of its sampler.

        An answer that its teacher then cannot score is left out: the caller counts it as lost.
        """
        assert top_k == 0, "a configuration that needs the sampler's top-k is refused"
        tasks = [
            asyncio.ensure_future(self._answered(chunk, temperature))
            for chunk in self._chunks(requests)
        ]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _chunks(self, requests: Sequence[tuple[str, Prompt]]) -> list[Sequence[tuple[str, Prompt]]]:
        """Requests of one domain each."""
        by_domain: dict[str, list[tuple[str, Prompt]]] = {}
        for request in requests:
            by_domain.setdefault(request[1].domain, []).append(request)
        return [
            own[start : start + AT_ONCE]
            for own in by_domain.values()
            for start in range(0, len(own), AT_ONCE)
        ]

    async def _answered(
        self, chunk: Sequence[tuple[str, Prompt]], temperature: float
    ) -> list[Rollout]:
        domain = chunk[0][1].domain
        answers = await self._teachers.answers(
            domain,
            chunk,
            temperature=temperature,
            seed=self._seed if temperature > 0 else None,
        )
        scores = await self._teachers.score(answers, teacher=self._teacher_of[domain])
        found = []
        for answer in answers:
            score = scores.get(answer.sample_id)
            if score is not None and not isinstance(score, TeacherFailed):
                found.append(replace(answer, sampler_logprobs=tuple(score.logprobs)))
        return found
