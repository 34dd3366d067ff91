"""What an evaluation leaves in a run's directory, made from answers alone.

retention.json       base, teachers and student: scores, quotients, intervals, tests
evaluation.json      every model on every set, router, divergence, sampled answers, settings
final_answers.json   every item's result by model, for comparing runs
samples.jsonl        answers of base, teacher and student side by side, to be read
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mopd.evaluation.against import against_student
from mopd.evaluation.items import ItemResult
from mopd.evaluation.retention import build_retention, write_retention
from mopd.evaluation.table import cross_table, macro, router_scores
from mopd.types import Prompt

RETENTION, EVALUATION = "retention.json", "evaluation.json"
FINAL_ANSWERS, SAMPLES = "final_answers.json", "samples.jsonl"
CLASSES = ("gained", "lost", "missed", "kept", "wrong")
SAMPLES_PER_CLASS = 6


@dataclass
class Evaluated:
    """All that was answered, by model and set."""

    prompts: Mapping[str, Sequence[Prompt]]
    """set -> its items."""
    domain_sets: Mapping[str, Sequence[str]]
    """domain -> its sets."""
    general: Sequence[str]
    """Sets without a teacher."""
    teacher_of: Mapping[str, str]
    """domain -> model."""
    results: Mapping[str, Mapping[str, Sequence[ItemResult]]]
    """model -> set -> answers; ``base`` and ``student`` are called so."""
    replicates: int
    seed: int
    majority: Mapping[str, float] = field(default_factory=dict)
    """set -> score of always giving the most frequent answer."""
    divergence: Mapping[str, Any] = field(default_factory=dict)
    """domain -> what `held_out_divergence` gave."""
    tokens: Mapping[str, tuple[Sequence[str], Sequence[float]]] = field(default_factory=dict)
    """item id -> texts of the student's tokens and teacher - student of each, nats."""
    sampled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """model -> set -> what `sampled_entry` gave."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Models, settings and cost, as they go into evaluation.json."""

    def roles(self, student: str = "student") -> dict[str, dict[str, Sequence[ItemResult]]]:
        """Base, teacher and `student` on the sets of the domains that `student` answered."""
        sets = {s: d for d, own in self.domain_sets.items() for s in own}
        teacher = {
            s: self.results[self.teacher_of[d]][s]
            for s, d in sets.items()
            if s in self.results.get(self.teacher_of[d], {})
        }
        theirs = self.results[student]
        names = [s for s in (*sets, *self.general) if s in theirs]
        base = self.results["base"]
        return {
            "base": {s: base[s] for s in names},
            "teacher": {s: teacher[s] for s in names if s in teacher},
            "student": {s: theirs[s] for s in names},
        }

    def retention(self, student: str = "student") -> dict[str, Any]:
        """``retention.json`` with `student` in the student's place."""
        return build_retention(
            self.roles(student),
            replicates=self.replicates,
            seed=self.seed,
            majority=self.majority,
            without_teacher=[s for s in self.general if s in self.results[student]],
            domains=self.domain_sets,
        )


def evaluation_record(evaluated: Evaluated) -> dict[str, Any]:
    """The content of ``evaluation.json``."""
    domains = {**evaluated.domain_sets, **{name: [name] for name in evaluated.general}}
    table = cross_table(
        evaluated.results, domains, replicates=evaluated.replicates, seed=evaluated.seed
    )
    fixed = {"base", "student", *evaluated.teacher_of.values()}
    return {
        **evaluated.about,
        "teacher_of": dict(evaluated.teacher_of),
        "general": list(evaluated.general),
        "table": table,
        "router": router_scores(table, evaluated.teacher_of),
        "others": {
            name: _other(evaluated, table, name) for name in evaluated.results if name not in fixed
        },
        "divergence": dict(evaluated.divergence),
        "sampled": dict(evaluated.sampled),
    }


def _other(evaluated: Evaluated, table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A further model (a baseline, say) in the student's place, and against the student."""
    retained = evaluated.retention(name)
    against, lead = against_student(
        evaluated.results[name],
        evaluated.results.get("student", {}),
        evaluated.domain_sets,
        replicates=evaluated.replicates,
        seed=evaluated.seed,
    )
    return {
        "headroom_captured": {
            domain: entry["headroom_captured"] for domain, entry in retained["domains"].items()
        },
        "mean_headroom_captured": retained["mean_headroom_captured"],
        "mean_headroom_ci95": retained["mean_headroom_ci95"],
        "mean": macro(table, name, list(evaluated.teacher_of)),
        "against_student": against,
        "lead": lead,
    }


def sample_records(evaluated: Evaluated) -> list[dict[str, Any]]:
    """Per set, up to `SAMPLES_PER_CLASS` items of each class, chosen by a hash of their ids.

    Classes: the student ``gained`` it against the base, ``lost`` it, ``missed`` what the teacher
    has, ``kept`` what the base had, or all are ``wrong``. Items with token differences come first.
    """
    records = []
    domain_of = {s: d for d, own in evaluated.domain_sets.items() for s in own}
    for name, prompts in evaluated.prompts.items():
        by_role = {
            role: {item.item_id: item for item in sets[name]}
            for role, sets in evaluated.roles().items()
            if name in sets
        }
        if "student" not in by_role:
            continue
        chosen: dict[str, int] = {}
        ordered = sorted(prompts, key=lambda p: (p.id not in evaluated.tokens, _hash(p.id)))
        for prompt in ordered:
            answers = {role: items[prompt.id] for role, items in by_role.items()}
            kind = _class({role: item.correct for role, item in answers.items()})
            if chosen.get(kind, 0) < SAMPLES_PER_CLASS:
                chosen[kind] = chosen.get(kind, 0) + 1
                records.append(_record(evaluated, prompt, domain_of.get(name), kind, answers))
    return records


def _class(correct: Mapping[str, bool | None]) -> str:
    base, teacher, student = (correct.get(r) for r in ("base", "teacher", "student"))
    if student is None:
        return "unjudged"
    if student:
        return "kept" if base else "gained"
    if base:
        return "lost"
    return "missed" if teacher else "wrong"


def _record(
    evaluated: Evaluated,
    prompt: Prompt,
    domain: str | None,
    kind: str,
    answers: Mapping[str, ItemResult],
) -> dict[str, Any]:
    tokens, differences = evaluated.tokens.get(prompt.id, ((), ()))
    return {
        "set": prompt.domain,
        "domain": domain,
        "id": prompt.id,
        "class": kind,
        "prompt": prompt.text,
        "reference": prompt.answer,
        "answers": {
            role: {
                "text": item.response,
                "correct": item.correct,
                "score": item.score,
                "tokens": item.response_tokens,
                "finish_reason": item.finish_reason,
            }
            for role, item in answers.items()
        },
        "tokens": list(tokens),
        "teacher_minus_student": [round(d, 5) for d in differences],
    }


def final_answers(evaluated: Evaluated) -> dict[str, Any]:
    """The content of ``final_answers.json``: model -> set -> [id, correct, score, tokens] each."""
    return {
        model: {
            name: [[i.item_id, i.correct, i.score, i.response_tokens] for i in items]
            for name, items in sets.items()
        }
        for model, sets in evaluated.results.items()
    }


def write_outcome(out_dir: Path, evaluated: Evaluated) -> dict[str, Any] | None:
    """Write all four files; returns the retention, None where no student was evaluated."""
    retention = None
    if "student" in evaluated.results:
        retention = evaluated.retention()
        write_retention(retention, out_dir / RETENTION)
        lines = [json.dumps(record, allow_nan=False) for record in sample_records(evaluated)]
        _replace(out_dir / SAMPLES, "".join(line + "\n" for line in lines))
    _replace(
        out_dir / EVALUATION,
        json.dumps(evaluation_record(evaluated), indent=1, allow_nan=False) + "\n",
    )
    _replace(out_dir / FINAL_ANSWERS, json.dumps(final_answers(evaluated), allow_nan=False))
    return retention


def scored_items(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """The items whose answers are compared token by token: `limit` of them, by a hash of the id."""
    return sorted(prompts, key=lambda p: _hash(p.id))[:limit]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
