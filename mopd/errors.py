"""Errors meant for users: each says what was got, what was expected, where, and what to do.

The command line prints their text without a traceback; anything else is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations


class MopdError(Exception):
    """Base of every error whose text is written for the user."""


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
