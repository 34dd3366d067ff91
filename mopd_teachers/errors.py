"""The one error of this package; its text is written for the user."""

from __future__ import annotations


class TeacherError(Exception):
    """A teacher is missing, unhealthy, or not the model it should be."""
