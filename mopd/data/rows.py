"""A file of prompts, row by row: what each row must hold, and what is wrong with those that don't.

Everything wrong with a file is reported together, each fault with its file and row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.config.schema import DomainConfig
from mopd.config.wording import kind_of, nearest
from mopd.errors import DataError

MAX_FAULTS = 20
NEEDS_ANSWER = ("exact_match", "math_verify", "reasoning_gym")
"""Built-in verifiers that compare with a reference answer."""


@dataclass(frozen=True)
class Row:
    """One JSONL row after its checks."""

    number: int
    key: str  # content: what makes two rows the same prompt
    prompt: str | list[dict[str, Any]]
    answer: str | None
    metadata: dict[str, Any]
    difficulty: float | None = None


def read_rows(
    file: Path,
    name: str,
    cfg: DomainConfig,
    known: Sequence[str],
    faults: list[str],
    notes: list[str],
) -> list[Row]:
    """The file's different rows; what is wrong with any of them goes to `faults`."""
    rows: dict[str, Row] = {}
    repeated = 0
    start = len(faults)
    try:
        # Not splitlines(): JSON text may hold other characters that it takes for line ends.
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"domain {name!r}: {file}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _row(number, line, name, cfg, known)
        except _RowFaults as error:
            faults += [f"{file}:{number}: {text}" for text in error.texts]
            continue
        first = rows.setdefault(row.key, row)
        if first is row:
            continue
        repeated += 1
        if first.answer != row.answer:
            faults.append(
                f"{file}:{number}: the same prompt as row {first.number} with another answer "
                f"({row.answer!r}, there {first.answer!r})"
            )
    if not rows and len(faults) == start:
        faults.append(f"{file}: no prompts in it")
    if repeated:
        notes.append(f"{file}: {repeated} rows repeat an earlier prompt and were dropped")
    return list(rows.values())


class _RowFaults(Exception):
    def __init__(self, *texts: str) -> None:
        self.texts = texts


def _row(number: int, line: bytes, name: str, cfg: DomainConfig, known: Sequence[str]) -> Row:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        row = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _RowFaults(f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise _RowFaults(f"not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise _RowFaults(f"expected a JSON object, got {kind_of(row)}")
    faults = []
    if "domain" in row and row["domain"] != name:
        got = row["domain"]
        hint = nearest(got, known) if isinstance(got, str) and got not in known else ""
        faults.append(f"domain is {json.dumps(got)}, but this file is given for {name!r}{hint}")
    if ("prompt" in row) == ("messages" in row):
        got = "both" if "prompt" in row else "neither"
        keys = f" (its keys: {', '.join(row)})" if got == "neither" else ""
        faults.append(f"needs either prompt or messages, got {got}{keys}")
    answer = row.get("answer")
    if answer is not None and not isinstance(answer, str):
        faults.append(f"answer should be text in quotes, got {kind_of(answer)}")
    verifier = cfg.verifier.name if cfg.verifier else None
    if answer is None and verifier in NEEDS_ANSWER:
        faults.append(f"no answer, which the verifier {verifier} compares with")
    if "prompt" in row:
        prompt = row["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            faults.append(f"prompt should be text, got {kind_of(prompt)}")
    elif "messages" in row:
        prompt = row["messages"]
        if not cfg.prompts.chat:
            faults.append(f"messages need domains.{name}.prompts.chat: true")
        if problem := _messages_problem(prompt):
            faults.append(problem)
    difficulty = None
    if (field := cfg.prompts.difficulty) is not None:
        difficulty, fault = number_at(row, field)
        faults += [fault] if fault else []
    if faults:
        raise _RowFaults(*faults)
    key = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    metadata = {k: v for k, v in row.items() if k not in ("prompt", "answer", "domain")}
    return Row(number, key, prompt, answer, metadata, difficulty)


def number_at(values: Mapping[str, Any], field: str) -> tuple[float | None, str | None]:
    """(the finite number in a field, None), or (None, what is wrong with it)."""
    if field not in values:
        known = [key for key, value in values.items() if _number(value) is not None]
        return None, f"no {field!r} to take the difficulty from{nearest(field, known)}"
    if (number := _number(values[field])) is None:
        return (
            None,
            f"{field} should be a finite number (the difficulty), got {kind_of(values[field])}",
        )
    return number, None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON allows integers of any length
        return None
    return number if math.isfinite(number) else None


def _messages_problem(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"messages should be a list of {{role, content}}, got {kind_of(messages)}"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"messages[{index}] should be {{role, content}}, got {kind_of(message)}"
        if not isinstance(message.get("content"), str):
            return f"messages[{index}].content should be text"
    if messages[-1]["role"] == "assistant":
        return "the last message is the assistant's: there is nothing left to answer"
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def raise_faults(faults: Sequence[str], what: str) -> None:
    if not faults:
        return
    shown = list(faults[:MAX_FAULTS])
    if len(faults) > MAX_FAULTS:
        shown.append(f"and {len(faults) - MAX_FAULTS} more")
    raise DataError.listing(what, shown)
