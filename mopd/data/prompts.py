"""A domain's prompts: read, checked, split by content, turned into token ids once.

Everything wrong with a file is reported together, each fault with its file and row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mopd.config.schema import DomainConfig, PromptsConfig
from mopd.data.harness import generation_notes, harness_items, load_task
from mopd.data.rows import Row, number_at, raise_faults, read_rows
from mopd.data.tasks import TaskItem, majority_baseline, make_items, split_items
from mopd.data.tokens import PromptEncoder
from mopd.errors import ConfigError, DataError
from mopd.types import Prompt


@dataclass(frozen=True)
class DomainData:
    """One domain, ready to train on and to evaluate."""

    name: str
    train: list[Prompt]
    held_out: list[Prompt]
    majority_baseline: float | None
    """Exact match of always giving the held-out prompts' most frequent answer (of the training
    prompts where none is held out); None unless every one of them has an answer."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Prompt id -> ``FILE:ROW`` or task item, for error messages."""
    notes: tuple[str, ...] = ()
    """What was done that a user may want to know (duplicates dropped, say)."""

    def describe(self) -> str:
        """One line for people: how many prompts, and what no skill at all would score."""
        baseline = "none" if self.majority_baseline is None else f"{self.majority_baseline:.3f}"
        return "; ".join(
            [
                f"{len(self.train)} prompts to train on, {len(self.held_out)} held out, "
                f"majority baseline {baseline}",
                *self.notes,
            ]
        )


@dataclass(frozen=True)
class ContextLimit:
    """How many tokens one model takes, prompt and response together."""

    who: str
    """For the message, e.g. ``student (models/base)`` or ``teacher math_rl``."""
    tokens: int
    domains: frozenset[str] | None = None
    """Whose prompts it reads; None: every domain's."""
    reserved: int = 0
    """Tokens it needs besides: 1 for a vLLM server that scores, which must generate one."""


def load_domain(
    name: str, cfg: DomainConfig, tokenizer: Any, *, known_domains: Sequence[str] = ()
) -> DomainData:
    """Load, split and encode one domain's prompts.

    JSONL rows: ``prompt`` (text) or ``messages`` (a chat; needs ``prompts.chat``), and optionally
    ``answer`` (text) and ``domain`` (must be this one); other keys become the prompt's metadata.
    ``prompts.difficulty`` names a key that every row to train on (or a task's every item) must have
    as a finite number.

    tokenizer: a transformers tokenizer, the student's.
    known_domains: all names, for the suggestion when a row names another domain.
    Raises DataError for the data (file and row named), ConfigError for the settings.
    """
    where = f"domains.{name}"
    encoder = PromptEncoder(tokenizer, chat=cfg.prompts.chat, where=f"{where}.prompts.chat")
    if cfg.prompts.task is not None:
        return _from_task(name, cfg, encoder, where)
    if cfg.prompts.lm_eval is not None:
        return _from_harness(name, cfg, encoder, where)
    if cfg.prompts.jsonl is None:
        raise ConfigError(f"{where}.prompts needs jsonl (a file) or task (a reasoning-gym task)")
    notes: list[str] = []
    faults: list[str] = []
    known = [*known_domains, name]
    file = Path(cfg.prompts.jsonl)
    rows = read_rows(file, name, cfg, known, faults, notes)
    held_file: Path | None = None
    held_rows: list[Row] = []
    if cfg.prompts.held_out_jsonl is not None:
        held_file = Path(cfg.prompts.held_out_jsonl)
        # A curriculum draws training prompts only.
        held_cfg = replace(cfg, prompts=replace(cfg.prompts, difficulty=None))
        held_rows = read_rows(held_file, name, held_cfg, known, faults, notes)
        trained = {row.key: row.number for row in rows}
        faults += [
            f"{held_file}:{row.number}: this held-out prompt is also trained on "
            f"({file}:{trained[row.key]})"
            for row in held_rows
            if row.key in trained
        ]
    raise_faults(faults, f"domain {name!r}")
    if held_file is None:
        rows, held_rows = _split(rows, cfg.held_out, where)
        held_file = file
    elif len(held_rows) > cfg.held_out:
        notes.append(f"{held_file}: {cfg.held_out} of {len(held_rows)} rows used (held_out)")
        _, held_rows = _split(held_rows, cfg.held_out, where)
    places: dict[str, str] = {}

    def built(chosen: Sequence[Row], origin: Path, infix: str) -> list[Prompt]:
        encoded = encoder.encode([row.prompt for row in chosen])
        result = []
        for row, (text, ids) in zip(chosen, encoded, strict=True):
            prompt_id = f"{name}/{infix}{row.number:05d}"
            places[prompt_id] = f"{origin}:{row.number}"
            result.append(
                Prompt(prompt_id, name, text, ids, row.answer, row.metadata, row.difficulty)
            )
        return result

    infix = "held-out-" if held_file != file else ""
    train, held = built(rows, file, ""), built(held_rows, held_file, infix)
    return _domain(name, train, held, places, notes)


def check_lengths(
    domains: Mapping[str, DomainData],
    max_response_tokens: int,
    limits: Sequence[ContextLimit] | Mapping[str, int],
) -> None:
    """ConfigError unless every prompt, with the longest answer allowed, fits its models.

    Names each model that is too short and the longest prompt that it has to take.
    limits: a mapping ``who -> tokens`` means models that read every domain and reserve nothing.
    """
    if isinstance(limits, Mapping):
        limits = [ContextLimit(who, tokens) for who, tokens in limits.items()]
    problems = []
    for limit in limits:
        read = [
            data for data in domains.values() if limit.domains is None or data.name in limit.domains
        ]
        found = [
            (len(prompt.token_ids), data.places.get(prompt.id, prompt.id))
            for data in read
            for prompt in (*data.train, *data.held_out)
        ]
        if not found:
            continue
        longest, place = max(found, key=lambda each: each[0])
        needed = longest + max_response_tokens + limit.reserved
        if needed > limit.tokens:
            extra = f" + {limit.reserved} that scoring generates" if limit.reserved else ""
            room = limit.tokens - limit.reserved - longest
            advice = (
                f"lower rollout.max_response_tokens to {room} or less, or drop long prompts"
                if room > 0
                else "drop long prompts, or take a model of longer context"
            )
            problems.append(
                f"{limit.who} takes {limit.tokens} tokens, but {place} ({longest} tokens) + "
                f"{max_response_tokens} of response{extra} = {needed}: {advice}"
            )
    if problems:
        raise ConfigError.listing("context too short", problems)


def _from_task(name: str, cfg: DomainConfig, encoder: PromptEncoder, where: str) -> DomainData:
    prompts = cfg.prompts
    assert prompts.task is not None
    items = make_items(
        prompts.task,
        prompts.params,
        size=prompts.size,
        seed=prompts.seed,
        template=prompts.template,
        key_fields=prompts.key_fields,
        unordered_key=prompts.unordered_key,
        where=f"{where}.prompts",
    )
    notes = []
    if len(items) < prompts.size:
        notes.append(f"{where}: {len(items)} different items among {prompts.size} generated")
    number = {item.key: index for index, item in enumerate(items)}
    try:
        parts = split_items(items, cfg.held_out)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    difficulties = _task_difficulties(name, items, prompts)
    places: dict[str, str] = {}
    built: list[list[Prompt]] = []
    for part in parts:
        encoded = encoder.encode([item.prompt for item in part])
        made = []
        for item, (text, ids) in zip(part, encoded, strict=True):
            prompt_id = f"{name}/{number[item.key]:05d}"
            places[prompt_id] = f"task {prompts.task} item {number[item.key]} ({item.key!r})"
            difficulty = difficulties.get(item.key)
            made.append(Prompt(prompt_id, name, text, ids, item.answer, item.metadata, difficulty))
        built.append(made)
    return _domain(name, built[0], built[1], places, notes)


def _from_harness(name: str, cfg: DomainConfig, encoder: PromptEncoder, where: str) -> DomainData:
    """Every document of the task; nothing is split off, and nothing of it is trained on."""
    task = load_task(cfg.prompts, where)
    items = harness_items(task, chat=cfg.prompts.chat)
    places, made = {}, []
    for item, (text, ids) in zip(items, encoder.encode([i.prompt for i in items]), strict=True):
        prompt_id = f"{name}/{item.number:05d}"
        places[prompt_id] = f"lm_eval {cfg.prompts.lm_eval} document {item.number}"
        metadata = {**item.metadata, "question": item.question}
        choices = tuple(encoder.encode_pair(*pair) for pair in item.choices)
        ids = max((first + then for first, then in choices), key=len, default=ids)
        made.append(
            Prompt(
                prompt_id, name, text, ids, item.answer, metadata, stop=item.stop, choices=choices
            )
        )
    return _domain(name, made, [], places, generation_notes(task))


def _task_difficulties(
    name: str, items: Sequence[TaskItem], prompts: PromptsConfig
) -> dict[str, float]:
    """Item key -> its difficulty; empty where ``prompts.difficulty`` is null."""
    if prompts.difficulty is None:
        return {}
    found: dict[str, float] = {}
    faults: list[str] = []
    for number, item in enumerate(items):
        value, fault = number_at(item.metadata["metadata"], prompts.difficulty)
        if value is None:
            faults.append(f"task {prompts.task} item {number} ({item.key!r}): {fault}")
        else:
            found[item.key] = value
    raise_faults(faults, f"domain {name!r}: prompts.difficulty {prompts.difficulty!r}")
    return found


def _domain(
    name: str, train: list[Prompt], held: list[Prompt], places: dict[str, str], notes: list[str]
) -> DomainData:
    empty = [places[prompt.id] for prompt in (*train, *held) if not prompt.token_ids]
    raise_faults([f"{place}: the prompt has no tokens" for place in empty], f"domain {name!r}")
    baseline = None
    judged = held or train
    if all(prompt.answer is not None for prompt in judged):
        baseline = majority_baseline(
            [TaskItem(p.id, p.text, p.answer, {}) for p in judged if p.answer is not None]
        )
    return DomainData(name, train, held, baseline, places, tuple(notes))


def _split(rows: Sequence[Row], held_out: int, where: str) -> tuple[list[Row], list[Row]]:
    """By content, with the same function as tasks."""
    by_key = {row.key: row for row in rows}
    items = [TaskItem(row.key, "", "", {}) for row in rows]
    try:
        train, held = split_items(items, held_out)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    return [by_key[item.key] for item in train], [by_key[item.key] for item in held]
