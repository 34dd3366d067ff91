"""Answers that were asked for once: append-only files that survive a kill, one a
(model, set, sampling).

    CACHE/MODEL-SET-SAMPLING.jsonl      a header line, then one line an answer

Lines are written as answers come; a torn last line is dropped when the file is read again, so an
evaluation that was stopped half-way asks only for what is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from mopd.errors import DataError

FORMAT = 2


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """One answer with its verdict, as it lies in the file."""

    key: str
    """``ITEM_ID#K``: the K-th answer to the item."""
    text: str
    ids: tuple[int, ...] | None
    """None where a server gave only text."""
    tokens: int
    finish_reason: str
    correct: bool | None
    score: float | None
    logprobs: tuple[float, ...] | None = None
    """[R] log pi of each id at temperature 1, over the ids that may be sampled; None where nobody
    said."""
    failure: str | None = None
    """Why there is no verdict, where the verifier failed: such an answer is judged again."""


class AnswerFile:
    """The answers of one model to one set with one sampling.

    Args:
        folder: the cache.
        parts: the three fingerprints: model, set, sampling.
        about: what they stand for, kept in the header for people.

    Raises:
        DataError: a line before the last is damaged, or the file is of another format.
    """

    def __init__(self, folder: Path, parts: tuple[str, str, str], about: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / ("-".join(part[:16] for part in parts) + ".jsonl")
        self.answers: dict[str, CachedAnswer] = {}
        header = {"format": FORMAT, "fingerprints": list(parts), **about}
        with self._held() as file:
            self._read(file, header)

    def add(self, answers: Iterable[CachedAnswer]) -> None:
        """Keep these; of two with one key the later counts."""
        new = list(answers)
        self.answers |= {answer.key: answer for answer in new}
        self._append([json.dumps(asdict(answer)) for answer in new])

    @contextlib.contextmanager
    def _held(self) -> Iterator[IO[bytes]]:
        """The open file, alone: another run may keep answers of the same model at the same time."""
        with self.path.open("ab+") as file:
            with contextlib.suppress(OSError):  # not on every file system
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _append(self, lines: list[str]) -> None:
        with self._held() as file:
            file.write("".join(line + "\n" for line in lines).encode())

    def _read(self, file: IO[bytes], header: Mapping[str, Any]) -> None:
        file.seek(0)
        whole, _, torn = file.read().rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        if torn:
            file.truncate(len(whole) + 1 if whole else 0)
        if not lines:  # new, or killed while writing the header
            file.write(json.dumps(header).encode() + b"\n")
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if number == 1:
                    if (record["format"], record["fingerprints"]) != (
                        FORMAT,
                        header["fingerprints"],
                    ):
                        raise ValueError(f"a header of {record}")
                else:
                    for key in ("ids", "logprobs"):
                        record[key] = None if record[key] is None else tuple(record[key])
                    answer = CachedAnswer(**record)
                    self.answers[answer.key] = answer
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(
                    f"{self.path}, line {number}: not an answer of this evaluation ({error}); "
                    "remove the file to ask again"
                ) from error
