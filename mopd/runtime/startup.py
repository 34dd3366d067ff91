"""Says what a start-up is waiting for, while several parts start at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Startup:
    """Keeps the set of things being waited for and tells `show` whenever it changes."""

    def __init__(self, show: Callable[[set[str]], None], note: Callable[[str], None]) -> None:
        self._show, self.note = show, note
        self._waiting: set[str] = set()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show `what` as being waited for while the block runs."""
        self._waiting.add(what)
        self._show(set(self._waiting))
        try:
            yield
        except BaseException:
            self._waiting.discard(what)
            raise
        self._waiting.discard(what)
        self._show(set(self._waiting))
