"""Held-out items that are trained on after all, found by content.

Splits are made by content within one file or task, so what is left to find is between files: a
benchmark whose questions are in a training file, one domain's held-out prompt in another domain's
training set, or the same question and answer with other capitals or blanks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mopd.evaluation.items import plain_text
from mopd.types import Prompt

SHOWN = 10


@dataclass(frozen=True)
class Leak:
    """One held-out item and the training prompt that gives it away."""

    held_out: Prompt
    trained: Prompt
    exact: bool
    """The texts are equal, not only alike up to case, width and blanks."""


def find_leaks(
    training: Mapping[str, Sequence[Prompt]], sets: Mapping[str, Sequence[Prompt]]
) -> list[Leak]:
    """Every held-out item whose text is a training prompt's, in the order of `sets`.

    Texts that are equal up to case, width and blanks count where the reference answers are equal:
    where case makes another answer ("spell Morgan", "spell morgan") it makes another question.
    """
    exact: dict[str, Prompt] = {}
    alike: dict[tuple[str, str | None], Prompt] = {}
    for prompts in training.values():
        for prompt in prompts:
            exact.setdefault(prompt.text, prompt)
            alike.setdefault((plain_text(prompt.text), prompt.answer), prompt)
    leaks = []
    for prompts in sets.values():
        for prompt in prompts:
            # Few-shot prompts of lm-evaluation-harness carry their question without the examples.
            question = prompt.metadata.get("question") if "lm_eval" in prompt.metadata else None
            texts = [prompt.text, *([question] if question else [])]
            same = next((exact[text] for text in texts if text in exact), None)
            found = same or next(
                (alike[key] for t in texts if (key := (plain_text(t), prompt.answer)) in alike),
                None,
            )
            if found is not None:
                leaks.append(Leak(prompt, found, same is not None))
    return leaks


def describe_leaks(leaks: Iterable[Leak], places: Mapping[str, str]) -> str:
    """One line a leak, the first `SHOWN` of them: where it is held out and where it is trained on.

    Args:
        places: prompt id -> ``FILE:ROW`` or task item.
    """
    lines = [
        f"{places.get(leak.held_out.id, leak.held_out.id)} is trained on as "
        f"{places.get(leak.trained.id, leak.trained.id)}"
        + ("" if leak.exact else " (up to case and blanks)")
        for leak in leaks
    ]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n  ".join([*lines[:SHOWN], *more])
