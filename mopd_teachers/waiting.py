"""A server that is still loading is waited for; one that answers wrongly is not.

Nobody there yet: connections are refused, its gateway has nobody behind it, or the list of its
models is still empty. Whatever else it answers will not change by waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp

from mopd_teachers.errors import TeacherError
from mopd_teachers.replica import Replica
from mopd_teachers.transport import Ask, RequestError

POLL_S = 1.0
REMIND_S = 30.0
_NOBODY = ("connection", "timeout", "http 502", "http 503", "http 504")


async def wait_until_there(
    ask: Ask, server: Replica, teacher: str, timeout_s: float, told: Callable[[str], None]
) -> None:
    """Return as soon as somebody answers at `server`, whatever it is.

    `told` hears who is waited for and why: at first, when that changes, and every 30 s.

    Raises TeacherError after `timeout_s` seconds.
    """
    begin = time.monotonic()
    reminded, said = begin, ""
    while (why := await _not_yet(ask, server)) is not None:
        waited = time.monotonic() - begin
        if waited >= timeout_s:
            raise TeacherError(
                f"teacher {teacher!r}: {server.url} was waited for {timeout_s:g} s "
                f"(start_timeout_s) in vain: {why}. Is a vLLM server being started there? Let it "
                "have more time by start_timeout_s, or correct the URL"
            )
        if why != said or time.monotonic() - reminded >= REMIND_S:
            reminded, said = time.monotonic(), why
            told(
                f"teacher {teacher}: waiting for its server {server.url} "
                f"({waited:.0f} of {timeout_s:g} s): {why}"
            )
        await asyncio.sleep(min(POLL_S, timeout_s - waited))


async def _not_yet(ask: Ask, server: Replica) -> str | None:
    """Why there is nobody to talk to; None where there is."""
    try:
        answer = await ask(server, "GET", "/v1/models")
    except RequestError as error:
        # A certificate that is not trusted today will not be tomorrow.
        waits = error.cause in _NOBODY and not isinstance(error.__cause__, aiohttp.ClientSSLError)
        return error.detail if waits else None
    if isinstance(answer, dict) and answer.get("data") == []:
        return "it lists no model yet"
    return None
