"""What of a configuration could not be read, and which other faults that explains.

Whoever wants to see every fault at once goes on with the rest: what could not be read has its
default, or a stand-in where it has none, and faults that are found only because of that are none.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from typing import Any

from mopd.config._yaml import KeyPath

NOT_GIVEN = "(not given)"
STAND_INS: dict[Any, Any] = {str: NOT_GIVEN, int: 1, float: 1.0}
"""For keys without a default, which are of these types."""


class Unread:
    """Faults of keys and types, each in words, and the keys whose values were left out."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._keys: set[str] = set()

    def add(self, text: str) -> None:
        """A fault that leaves nothing out that would be needed."""
        self.texts.append(text)

    def leave_out(self, path: KeyPath, kind: Any) -> None:
        """Nothing is known of this key of type `kind`, nor of what would stand below it."""
        self._keys.add(".".join(path))
        if dataclasses.is_dataclass(kind):
            for name, each in typing.get_type_hints(kind).items():
                self.leave_out((*path, name), each)

    def left_out(self) -> Iterator[str]:
        """One line for each key that was left out, beginning with it as `check_config`'s do."""
        for key in sorted(self._keys):
            yield f"{key}: left out"

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def explains(self, problem: str) -> bool:
        """Whether one of `check_config`'s may be there only because of what was left out: it is
        about such a key or one below it, or names one, in full or with its section."""
        if NOT_GIVEN in problem:
            return True
        about = problem.split(maxsplit=1)[0].rstrip(":,")
        for key in self._keys:
            section, _, name = key.rpartition(".")
            if f"{about}.".startswith(f"{key}.") or (section and _named(key, problem)):
                return True
            if name == "name" and f"{about}.".startswith(f"{section}."):
                return True  # which one it is says what it may hold
            beside = about.rpartition(".")[0] == section or _named(section, problem)
            if section and beside and _named(name, problem):
                return True
        wholes = [key for key in ("teachers", "domains") if key in self._keys]
        return any(_named(key, problem) or f"no {key[:-1]}" in problem for key in wholes)


def _named(key: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) is not None
