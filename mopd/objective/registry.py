"""Looking a name up in a registry, with an error that helps."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from mopd.errors import ConfigError

Entry = TypeVar("Entry")


def lookup(registry: Mapping[str, Entry], name: str, key: str) -> Entry:
    """registry[name]; ConfigError naming the configuration `key` and the nearest known name."""
    if name in registry:
        return registry[name]
    near = difflib.get_close_matches(str(name), registry, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{key} is {name!r}; expected one of {', '.join(sorted(registry))}.{hint}")
