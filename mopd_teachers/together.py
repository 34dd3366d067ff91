"""Several things at once, until the first of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_BEGIN_AT_ONCE = 16

T = TypeVar("T")


async def all_of(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each gives, in their order; the first error ends the others. They begin a few at a time,
    so that what else is in flight goes on where a beginning takes long."""
    tasks: list[asyncio.Task[T]] = []
    try:
        for part in parts:
            tasks.append(asyncio.create_task(part))
            if len(tasks) % _BEGIN_AT_ONCE == 0:
                await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
