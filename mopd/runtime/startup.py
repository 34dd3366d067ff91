"""Several parts started at once: what is being waited for, and an end at the first error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mopd_teachers.together import all_of

__all__ = ["Startup", "all_of"]


class Startup:
    """Keeps the set of things being waited for and tells `show` whenever it changes. `note` is told
    what the user should know, `warn` what should also be kept beyond the display."""

    def __init__(
        self,
        show: Callable[[set[str]], None],
        note: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._show, self.note, self.warn = show, note, warn
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
