"""What the first evaluation says about a run before its first step: loud warnings, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mopd.evaluation.items import Answers, ItemResult
from mopd.evaluation.metrics import interval, paired_bootstrap

NEAR_ZERO = 0.05
"""A base below this rarely samples a right answer to learn from: seen on a toy, .04 did not move
in 150 steps while .65 reached its teacher's .985 in 25."""


def teacher_warnings(
    base: Answers,
    teacher: Answers,
    *,
    student_model: str,
    teacher_of: Mapping[str, str | None],
    replicates: int = 1000,
    seed: int = 0,
) -> list[str]:
    """One line for each set of a domain on which distillation is unlikely to help.

    Args:
        student_model: the base's folder, for the advice.
        teacher_of: set -> its teacher's name; None: a general set.
    """
    lines = []
    for name, theirs in teacher.items():
        own = {item.item_id: item.correct for item in base[name]}
        pairs = [
            (float(b), float(item.correct))
            for item in theirs
            if item.correct is not None and (b := own.get(item.item_id)) is not None
        ]
        if not pairs:
            continue
        values = np.array(pairs)
        b, t = values.mean(axis=0)
        means = paired_bootstrap(values, replicates=replicates, seed=seed)
        low, high = interval(means[:, 1] - means[:, 0])
        assert low is not None and high is not None
        scores = (
            f"{t:.1%} of {len(pairs)} held-out prompts, the base {b:.1%} (difference "
            f"{100 * (t - b):+.1f} points, 95% interval [{100 * low:+.1f}, {100 * high:+.1f}])"
        )
        if low <= 0:
            pull = "down to it" if t < b else "towards it, which gains nothing that can be measured"
            lines.append(
                f"{name}: teacher {teacher_of.get(name)} is not clearly better than the base: it "
                f"answers {scores}. Distillation pulls the student {pull}. Take a better teacher, "
                "or keep what the base can do by making the base this domain's teacher: "
                f"teachers.self.model={student_model} domains.{name}.teacher=self"
            )
        elif b < NEAR_ZERO:
            lines.append(
                f"{name}: the base is near 0: its teacher answers {scores}. A student that never "
                "succeeds learns slowly, if at all, from its own samples: train it on some of the "
                "teacher's answers first, or begin with easier prompts"
            )
    return lines


def verifier_warnings(answers: Mapping[str, Answers]) -> list[str]:
    """A verifier that says the same of every answer of every model judges nothing.

    Args:
        answers: model -> set -> its answers; two models or more.
    """
    lines = []
    for name in dict.fromkeys(s for sets in answers.values() for s in sets):
        said = {item.correct for items in _each(answers, name) for item in items}
        models = sum(name in sets for sets in answers.values())
        texts = {item.response for items in _each(answers, name) for item in items}
        if len(said) == 1 and models > 1 and len(texts) > 1 and None not in said:
            word = "right" if said == {True} else "wrong"
            lines.append(
                f"{name}: every answer of {models} models was judged {word}; either the set is "
                f"too {'easy' if word == 'right' else 'hard'} to tell models apart, or its "
                "verifier does not look at the answers"
            )
    return lines


def _each(answers: Mapping[str, Answers], name: str) -> Iterator[Sequence[ItemResult]]:
    for sets in answers.values():
        if name in sets:
            yield sets[name]
