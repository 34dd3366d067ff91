"""Append-only JSON lines that survive a killed process and a resumed run.

One object a line, each with an integer ``step``. A line is written with one call and flushed, so a
killed process leaves at most one torn line, at the end; `resume` drops it. NaN and infinity are
not JSON: the values become null and their names are returned, so that somebody says so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mopd.errors import MopdError


class JsonLines:
    """One file; `resume_step` None starts it, k goes on after step k."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """
        Raises:
            MopdError: the file of another run is there and the run does not resume it.
        """
        self.path = path
        self.kept: list[dict[str, Any]] = []
        """Lines of steps <= resume_step that were there already."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            if path.exists() and path.stat().st_size > 0:
                raise MopdError(
                    f"{path} already holds an earlier run's records and would be mixed with this "
                    "run's. Resume that run (resume=true), or choose another name=…"
                )
        elif path.exists():
            self.kept = _truncate(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> list[str]:
        """Write one record; returns the paths of values that were not finite (written as null)."""
        not_finite: list[str] = []
        line = json.dumps(_finite(record, "", not_finite), allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()
        return not_finite

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _truncate(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop what lies past `step` (and a torn last line) by writing the file anew; returns the rest.

    Raises:
        MopdError: a line before the last is not a record; it was not us who wrote that.
    """
    # not splitlines(): a string may hold U+2028, which is no line end to JSON
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept: list[dict[str, Any]] = []
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["step"] <= step:
                kept.append(record)
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise MopdError(
                    f"{path}, line {number} is not a record with a step ({error}): {line[:80]!r}. "
                    "Mend or remove the file to resume this run."
                ) from error
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        for record in kept:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return kept


def _finite(value: Any, where: str, not_finite: list[str]) -> Any:
    """`value` as JSON can hold it; numbers of numpy and torch become Python's."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _finite(v, f"{where}.{k}".strip("."), not_finite) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v, f"{where}[{k}]", not_finite) for k, v in enumerate(value)]
    if hasattr(value, "item"):  # a numpy scalar or a tensor of one element
        return _finite(value.item(), where, not_finite)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        not_finite.append(where)
        return None
    raise TypeError(f"{where}: {type(value).__name__} cannot be written as JSON")
