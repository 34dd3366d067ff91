"""Several parts started at once: what is being waited for, and an end at the first error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any


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


async def all_or_first_error(*parts: Awaitable[Any]) -> None:
    """Run all; at the first error cancel the rest and raise it."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
