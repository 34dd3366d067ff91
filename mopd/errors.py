"""Errors meant for users: each says what was got, what was expected, where, and what to do.

The command line prints their text without a traceback; anything else is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self


class MopdError(Exception):
    """Base of every error whose text is written for the user."""

    faults: tuple[str, ...] = ()
    """Each fault by itself, in words that need no other; empty where the text is all of one."""

    @classmethod
    def listing(cls, head: str, problems: Sequence[str]) -> Self:
        """One error for all of `problems`: a line for one of them, a list for several."""
        each = [f"{head}: {problem}" for problem in problems]
        if len(each) == 1:
            return cls(each[0])
        text = f"{head} ({len(problems)} problems):\n"
        error = cls(text + "\n".join(f"  - {problem}" for problem in problems))
        error.faults = tuple(each)
        return error

    def reworded(self, old: str, new: str) -> Self:
        """The same error with `new` wherever its text has `old`."""
        error = type(self)(str(self).replace(old, new))
        error.faults = tuple(fault.replace(old, new) for fault in self.faults)
        return error


class ConfigError(MopdError):
    """The configuration is wrong; the text names the key (and the nearest known name)."""


class DataError(MopdError):
    """A prompt file, row or task is wrong; the text names file and row."""


class ModelError(MopdError):
    """A checkpoint or tokenizer is missing, unreadable or does not match the others."""


class TeacherError(MopdError):
    """A teacher server is missing, unhealthy, or not the model it should be."""


class WeightSyncError(MopdError):
    """The rollout engine does not hold the trainer's weights."""


class FailureBudgetError(MopdError):
    """More samples failed than `failures` in the configuration allows."""

    finished_steps: int = 0
    """Steps before the one that lost them; its prompts were drawn and never trained on."""


class Faults:
    """Errors of several independent checks, so that a user sees all of them at once."""

    def __init__(self) -> None:
        self._found: list[MopdError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep the MopdError that ends the block, and go on after it."""
        try:
            yield
        except MopdError as error:
            self._found.append(error)

    def raise_any(self) -> None:
        """Raise the one that was kept, or one for all of them: of the first one's type, with the
        faults of each."""
        if not self._found:
            return
        if len(self._found) == 1:
            raise self._found[0]
        whole = type(self._found[0])(
            f"{len(self._found)} things are wrong:\n"
            + "\n".join(f"* {error}" for error in self._found)
        )
        whole.faults = tuple(
            fault for error in self._found for fault in error.faults or (str(error),)
        )
        raise whole
