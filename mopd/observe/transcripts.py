"""Sampled answers to read: what was asked, what came, and what the teacher made of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from mopd.observe.jsonl import JsonLines

TRANSCRIPTS = "transcripts.jsonl"


class TranscriptWriter:
    """Keeps the first `per_domain` answers of each domain in every `every`-th step.

    The first ones of a step are as random as any: prompts are drawn at random.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int | None = None,
        per_domain: int = 2,
        every: int = 1,
    ) -> None:
        assert per_domain >= 0 and every >= 1
        self._file = JsonLines(run_dir / TRANSCRIPTS, resume_step=resume_step)
        self._per_domain = per_domain
        self._every = every
        self._step = -1
        self._count: dict[str, int] = {}

    def wants(self, step: int, domain: str) -> bool:
        """Would `write` keep an answer of this step and domain? Ask before decoding tokens."""
        if step % self._every:
            return False
        written = self._count.get(domain, 0) if step == self._step else 0
        return written < self._per_domain

    def write(
        self,
        step: int,
        domain: str,
        sample_id: str,
        *,
        prompt: str,
        response: str,
        correct: bool | None,
        tokens: Sequence[str] = (),
        teacher_minus_student: Sequence[float | None] = (),
    ) -> bool:
        """Write one answer if there is room for it; returns whether it was written.

        Args:
            tokens: [R] text of each sampled id.
            teacher_minus_student: [R] log T - log pi of each, nats; empty if it was not scored.
        """
        if teacher_minus_student and len(teacher_minus_student) != len(tokens):
            raise ValueError(
                f"{sample_id}: {len(tokens)} tokens but {len(teacher_minus_student)} differences"
            )
        if not self.wants(step, domain):
            return False
        if step != self._step:
            self._step, self._count = step, {}
        self._count[domain] = self._count.get(domain, 0) + 1
        self._file.append(
            {"step": step, "domain": domain, "sample_id": sample_id, "prompt": prompt,
             "response": response, "correct": correct, "tokens": list(tokens),
             "teacher_minus_student": list(teacher_minus_student)}
        )  # fmt: skip
        return True

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
