"""Errors meant for users: each says what was got, what was expected, where, and what to do.

The command line prints their text without a traceback; anything else is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MopdError(Exception):
    """Base of every error whose text is written for the user."""

    faults: tuple[str, ...] = ()
    """Each fault by itself, where the error stands for several (see `Faults`)."""


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
        """Raise the one that was kept, or one for all of them: of the first one's type, with each
        in `faults`."""
        if not self._found:
            return
        if len(self._found) == 1:
            raise self._found[0]
        texts = [str(error) for error in self._found]
        whole = type(self._found[0])(
            f"{len(texts)} things are wrong:\n" + "\n".join(f"* {text}" for text in texts)
        )
        whole.faults = tuple(texts)
        raise whole
