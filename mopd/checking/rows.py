"""One finding of `mopd check`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, WARNING, FAILED = "ok", "warning", "failed"


@dataclass(frozen=True, slots=True)
class Row:
    """What was asked of which part, and the answer."""

    part: str
    """``configuration``, ``prompts``, ``memory``, ``teacher NAME``, ..."""
    what: str
    status: str
    """`OK`, `WARNING` or `FAILED`."""
    detail: str

    def __str__(self) -> str:
        said = f"{self.part}: {self.what}" if self.what else self.part
        return f"{self.status:<7} {said}: {self.detail}"


def is_good(rows: Sequence[Row]) -> bool:
    """Whether a run may be started: nothing failed."""
    return all(row.status != FAILED for row in rows)


def as_json(config: Sequence[str], rows: Sequence[Row]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {"good": is_good(rows), "config": list(config), "rows": [asdict(row) for row in rows]}
