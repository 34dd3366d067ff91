"""What has been answered and scored of each model, and what is still to be asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mopd.config.schema import Config
from mopd.evaluating.models import ModelUnderTest
from mopd.evaluation.answer_cache import AnswerFile
from mopd.evaluation.answering import answer_key
from mopd.evaluation.outcome import scored_items
from mopd.types import Prompt

SCORED_ITEMS = 200
"""Items a set whose answers are compared token by token; all of them, where there are fewer."""


@dataclass
class Sampling:
    """One way of answering: greedy, sampled, or sampled once at temperature 1 for divergence."""

    name: str
    temperature: float
    count: int
    settings: Mapping[str, Any]
    items: int | None = None
    """None: every item; else `scored_items` of each set."""

    def wanted(self, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, Prompt]:
        return {
            answer_key(prompt.id, k): prompt
            for prompts in sets.values()
            for prompt in (prompts if self.items is None else scored_items(prompts, self.items))
            for k in range(self.count)
            if self.name == "greedy" or not prompt.choices
        }


@dataclass
class Work:
    """One model with its files: what it has answered and what it lacks."""

    model: ModelUnderTest
    files: dict[str, dict[str, AnswerFile]] = field(default_factory=dict)
    """sampling -> set -> file."""
    todo: dict[str, dict[str, Prompt]] = field(default_factory=dict)
    """sampling -> key -> prompt."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    cost: dict[str, float] = field(default_factory=dict)


class Scores:
    """Logprobs of the student's tokens, one file a (scorer, student, set, sampling)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, dict[str, list[float]]] = {}

    def _path(self, scorer: Work, student: Work, sampling: str, name: str) -> Path:
        answers = student.files[sampling][name].path.stem
        return self._folder / f"{answers}-by-{scorer.model.fingerprint[:16]}.json"

    def has(self, scorer: Work, student: Work, sampling: str, sets: Sequence[str]) -> bool:
        """Whether every set's answers that are to be scored have been."""
        return all(
            {answer_key(p.id) for p in scored_items(student.model.sets[name], SCORED_ITEMS)}
            <= set(self.get(scorer, student, sampling, name))
            for name in sets
        )

    def get(self, scorer: Work, student: Work, sampling: str, name: str) -> dict[str, list[float]]:
        path = self._path(scorer, student, sampling, name)
        if path not in self._known:
            self._known[path] = json.loads(path.read_text()) if path.exists() else {}
        return self._known[path]

    def put(
        self,
        scorer: Work,
        student: Work,
        sampling: str,
        name: str,
        values: Mapping[str, Sequence[float]],
    ) -> None:
        path = self._path(scorer, student, sampling, name)
        self._known[path] = {key: [float(x) for x in row] for key, row in values.items()}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self._known[path]))
        partial.rename(path)


def samplings(config: Config) -> list[Sampling]:
    """The ways in which models answer, each with all that decides what comes out."""
    evaluation = config.evaluation
    common = {"max_response_tokens": config.rollout.max_response_tokens}
    seeded = {**common, "seed": evaluation.seed}
    found = [Sampling("greedy", 0.0, 1, {**common, "temperature": 0.0})]
    if evaluation.samples:
        settings = {**seeded, "temperature": evaluation.temperature}
        found.append(Sampling("sampled", evaluation.temperature, evaluation.samples, settings))
    once = {**seeded, "temperature": 1.0, "purpose": "divergence"}
    found.append(Sampling("divergence", 1.0, 1, once, items=SCORED_ITEMS))
    return found
