"""Says what a start-up is waiting for, while several parts start at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Startup:
    """Keeps the set of things being waited for and tells `show` whenever it changes."""

    def __init__(self, show: Callable[[set[str]], None], note: Callable[[str], None]) -> None:
        self._show, self.note = show, note
        self._waiting: dict[str, float] = {}

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show `what` as being waited for while the block runs, then how long it took."""
        self._waiting[what] = time.monotonic()
        self._show(set(self._waiting))
        try:
            yield
        except BaseException:
            self._waiting.pop(what)
            raise
        elapsed = time.monotonic() - self._waiting.pop(what)
        self._show(set(self._waiting))
        self.note(f"{what}: ready after {elapsed:.0f} s")
