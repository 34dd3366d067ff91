"""Verifiable tasks: items of a reasoning-gym generator, their split, their scorer.

Imports reasoning_gym only when a task is really asked for, and no torch, vllm or ray ever.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mopd.errors import ConfigError, DataError


@dataclass(frozen=True)
class TaskItem:
    """One question with its answer.

    Example: ``TaskItem(key="+ 12 34", prompt="sum 12 + 34:", answer="46", metadata={...})``.
    """

    key: str  # content key: two items with one key are the same question
    prompt: str  # rendered text, what the student reads
    answer: str  # the generator's own answer, exact match is against it
    metadata: dict[str, Any]  # reasoning-gym entry: question, answer, metadata (for its scorer)


def make_items(
    task: str,
    params: Mapping[str, Any],
    *,
    size: int,
    seed: int,
    template: str,
    key_fields: Sequence[str] = (),
    unordered_key: bool = False,
    where: str = "",
) -> list[TaskItem]:
    """Draw `size` entries of `task` and keep the first of every key, in the order drawn.

    template: ``str.format`` over the entry's metadata fields, plus ``{question}`` (full text).
    key_fields: metadata fields that make two entries the same question; none: the prompt.
    unordered_key: sort the whitespace-separated parts of the key fields, so that ``1 + 2`` and
        ``2 + 1`` are one key.
    where: prefix of error messages, the place in the configuration.
    """
    at = f"{where}: " if where else ""
    if size < 1:
        raise ConfigError(f"{at}size must be at least 1, got {size}")
    names = _template_fields(template, at)
    dataset = _dataset(task, params, size=size, seed=seed, at=at)
    items: dict[str, TaskItem] = {}
    for index in range(size):
        entry = dataset[index]
        fields = {**entry["metadata"], "question": entry["question"]}
        if index == 0:
            _check_fields(names, fields, f"{at}template {template!r}")
            _check_fields(key_fields, fields, f"{at}key_fields")
        prompt = template.format(**fields)
        parts = [str(fields[name]) for name in key_fields] or [prompt]
        if unordered_key:
            parts = sorted(part for text in parts for part in text.split())
        key = " ".join(parts)
        if key not in items:
            items[key] = TaskItem(key, prompt, str(entry["answer"]), entry)
    return list(items.values())


def split_items(items: Sequence[TaskItem], held_out: int) -> tuple[list[TaskItem], list[TaskItem]]:
    """(train, held-out) by content: the `held_out` items whose keys hash lowest are held out.

    Depends on the set of keys only, so that neither the order of the items, nor the seed that
    drew them, nor the process (Python's own hash is salted) moves an item across. Both parts
    keep the order of `items`; of several items with one key the first stays.
    """
    unique = list({item.key: item for item in reversed(items)}.values())[::-1]
    if held_out < 0:
        raise DataError(f"held_out must be 0 or more, got {held_out}")
    if held_out >= len(unique):
        raise DataError(
            f"held_out is {held_out}, but only {len(unique)} different items exist and at least "
            "one must be left to train on: lower held_out, raise size, or widen the parameters"
        )
    chosen = set(sorted((item.key for item in unique), key=_digest)[:held_out])
    return (
        [item for item in unique if item.key not in chosen],
        [item for item in unique if item.key in chosen],
    )


def reasoning_gym_score(
    task: str, params: Mapping[str, Any], item: TaskItem, answer: str | None
) -> float:
    """The package's own score in [0, 1], partial credit included (exact match is not it)."""
    scorer = _scorer(task, tuple(sorted((k, repr(v)) for k, v in params.items())), _Box(params))
    return float(scorer(answer, item.metadata))


def majority_baseline(items: Sequence[TaskItem]) -> float:
    """Exact match of always giving the most frequent answer: a score below it is no skill."""
    if not items:
        raise DataError("majority baseline of no items")
    return Counter(item.answer for item in items).most_common(1)[0][1] / len(items)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _template_fields(template: str, at: str) -> list[str]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"{at}template {template!r} does not parse: {error}") from error
    if not names:
        raise ConfigError(
            f"{at}template {template!r} names no field, so every prompt would be the same; "
            "use {question} or a metadata field"
        )
    if bad := [name for name in names if not name.isidentifier()]:
        raise ConfigError(f"{at}template {template!r}: {bad[0]!r} is not a plain field name")
    return names


def _check_fields(names: Sequence[str], fields: Mapping[str, Any], what: str) -> None:
    for name in names:
        if name not in fields:
            raise ConfigError(f"{what}: no field {name!r}{_nearest(name, fields)}")


def _nearest(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(names)}" if len(names) <= 20 else ""


def _dataset(task: str, params: Mapping[str, Any], *, size: int, seed: int, at: str) -> Any:
    """The package's dataset object; every way it can refuse becomes a ConfigError."""
    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{at}task {task!r} needs the package reasoning-gym, which does not import here "
            f"({error}); install the project's lock file"
        ) from error
    import reasoning_gym

    if task not in DATASETS:
        raise ConfigError(f"{at}unknown reasoning-gym task {task!r}{_nearest(task, DATASETS)}")
    known = [
        name
        for name in inspect.signature(DATASETS[task][1]).parameters
        if name not in ("size", "seed")
    ]
    for name in params:
        if name in ("size", "seed"):
            raise ConfigError(f"{at}{name} stands beside params, not in them")
        if name not in known:
            raise ConfigError(f"{at}task {task!r} has no parameter {name!r}{_nearest(name, known)}")
    if task == "base_conversion":
        _refuse_endless_base_conversion(params, DATASETS[task][1](), at)
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **params)
    except Exception as error:  # the package asserts, and its generators raise whatever they like
        raise ConfigError(
            f"{at}reasoning-gym refuses {dict(params)} for {task!r}: "
            f"{str(error) or type(error).__name__}"
        ) from error


def _refuse_endless_base_conversion(params: Mapping[str, Any], defaults: Any, at: str) -> None:
    low = params.get("min_base", defaults.min_base)
    high = params.get("max_base", defaults.max_base)
    if low == high:
        # It draws until source and target base differ, which they never do.
        raise ConfigError(
            f"{at}base_conversion needs min_base < max_base, got {low} for both: "
            "the generator would never return"
        )


class _Box:
    """Carries a value past `cache` without being part of its key."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Box)


@cache
def _scorer(task: str, _key: tuple, params: _Box) -> Callable[[str | None, dict], float]:
    return _dataset(task, params.value, size=1, seed=0, at="").score_answer
