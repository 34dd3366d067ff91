"""Noticing at once that a server was restarted which does not say so.

A connection over which nothing is asked ends with the process at its other end. A server that is
reached directly keeps it open: the time after which idle connections are closed begins with the
end of a request. What stands between, a gateway, may be its other end instead; then nothing is
noticed by it, and one that hangs up on whoever says nothing is left alone.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from mopd_teachers.replica import Replica

SHORT_S = 10.0
_TRIES = 3
_CONNECT_S = 5.0


class Watch(asyncio.Protocol):
    """One such connection to a server, which `Replica.went_away` when it ends."""

    def __init__(self, server: Replica, hung_up: int) -> None:
        self._server, self._hung_up = server, hung_up
        self._loop = asyncio.get_running_loop()
        self._begun = time.monotonic()
        self._transport: asyncio.Transport | None = None
        self._lost_at: float | None = None

    @classmethod
    async def begin(cls, server: Replica, before: Watch | None) -> Watch | None:
        """A watch over `server`: the one `before` while it holds, or says that there is no use in
        one. None where it cannot be begun."""
        if before is not None and (before.holds or before.useless):
            return before
        watch = cls(server, 0 if before is None else before._hung_up)
        where = urlsplit(server.url)
        secure = where.scheme.lower() == "https"
        port = where.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await watch._loop.create_connection(
                    lambda: watch, where.hostname or "", port, ssl=True if secure else None
                )
        except OSError:  # a timeout is one
            return None
        return watch

    @property
    def holds(self) -> bool:
        """Whether the connection is there, in this event loop."""
        return self._lost_at is None and self._loop is asyncio.get_running_loop()

    @property
    def useless(self) -> bool:
        """Whether several in a row have ended soon, which no server does by being restarted."""
        return self._hung_up >= _TRIES

    def end(self) -> None:
        """Watch no more."""
        if self.holds and self._transport is not None:
            self._lost_at = time.monotonic()
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            self._hung_up = self._hung_up + 1 if self._lost_at - self._begun < SHORT_S else 0
            self._server.went_away()
