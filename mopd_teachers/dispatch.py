"""Which server gets a request, what happens when it fails, and when a second one is asked, too.

A request goes to the server that is well and has the least to do, counted with what it would have
to read twice because another server has the beginning in its prefix cache. It is tried again,
elsewhere where there is another, with growing pauses. With `hedge_after_s` a question that is still
unanswered after that long (with `hedge_quantile`: and after longer than that share of the last
requests took) is also put to another server, as soon as one has nothing to do; the
first good answer counts and the other request is given up, which ends its work at a server of
ours. Losing such a race counts as a failure of the slow server, so that one that hangs is left
alone after three (see `replica`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp

from mopd_teachers import transport
from mopd_teachers.errors import TeacherError
from mopd_teachers.prefixes import Reading
from mopd_teachers.probes import require_same_model
from mopd_teachers.replica import Endpoint, Replica
from mopd_teachers.stats import TeacherStats
from mopd_teachers.transport import BUSY, RequestError

_BACKOFF_S = 0.2
_BACKOFF_MAX_S = 5.0
_QUICK_S = 5.0  # deadline of a question that costs the server nothing
_LOOK_AGAIN_S = 0.05  # for a server that has nothing to do
_BUSY_MAX_S = 30.0
_BUSY_DEADLINES = 10  # deadlines of a request that a server may say for that it is busy

DOWN = "down"

T = TypeVar("T")


class FellIll(RequestError):
    """A request was not made, because its server failed others while it waited there."""

    def __init__(self, server: Replica) -> None:
        super().__init__(DOWN, server.last_error, retry=True, blames=False)


class Dispatcher:
    """The servers of one teacher and the requests to them."""

    def __init__(
        self,
        name: str,
        endpoints: Sequence[Endpoint],
        *,
        timeout_s: float,
        retries: int,
        concurrency: int,
        hedge_after_s: float | None,
        hedge_quantile: float | None,
    ) -> None:
        if not endpoints:
            raise TeacherError(f"teacher {name!r}: no endpoint given; expected at least one URL")
        self.name = name
        self.stats = TeacherStats()
        self._timeout_s, self._retries, self._concurrency = timeout_s, retries, concurrency
        self._hedge_after_s, self._hedge_quantile = hedge_after_s, hedge_quantile
        self._servers = [self._replica(endpoint) for endpoint in endpoints]
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _replica(self, endpoint: Endpoint) -> Replica:
        return Replica(self.name, endpoint, self._timeout_s, self._concurrency)

    def _open(self) -> aiohttp.ClientSession:
        """The session of the running event loop (a session cannot move to another loop)."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            for server in self._servers:
                server.enter_loop()
            # Idle connections are dropped before the server (5 s) would.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            self._session = aiohttp.ClientSession(connector=connector)
            self._loop = loop
        return self._session

    async def close(self) -> None:
        """Close the connections. The client can be used again afterwards."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    async def _ask(
        self, server: Replica, method: str, path: str, body: Any = None, **how: Any
    ) -> Any:
        """One try of one request (see `transport.request`)."""
        how.setdefault("timeout_s", self._timeout_s)
        return await transport.request(self._open(), server, method, path, body, **how)

    async def _quick(
        self, server: Replica, method: str, path: str, body: Any = None, **how: Any
    ) -> Any:
        how["timeout_s"] = min(self._timeout_s, _QUICK_S)
        return await self._ask(server, method, path, body, **how)

    async def _again(
        self, server: Replica, method: str, path: str, body: Any = None, **how: Any
    ) -> Any:
        """A request to this very server, with the usual retries."""
        attempt = busy = 0
        patience_ends = time.monotonic() + _BUSY_DEADLINES * self._timeout_s
        while True:
            try:
                return await self._ask(server, method, path, body, **how)
            except RequestError as error:
                if error.cause == BUSY and time.monotonic() < patience_ends:
                    busy += 1
                    await self._wait_while_busy(error, busy)
                    continue
                if not error.retry or attempt >= self._retries:
                    raise
                self.stats.retries += 1
                attempt += 1
                await asyncio.sleep(_BACKOFF_S * random.uniform(0.5, 1.5))

    async def _wait_while_busy(self, error: RequestError, times: int) -> None:
        """`times`: how often this request was refused so."""
        self.stats.busy += 1
        pause_s = min(error.wait_s or _pause_s(times), _BUSY_MAX_S)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))

    def _least_loaded(self, reading: Reading, avoid: Replica | None) -> Replica:
        """A server that is well and will have the least to do with `reading`; the one that has just
        failed comes after the others, but before one that is on trial.

        Tokens that another server has in its cache count three times at one that has work: nobody
        gains by them, and all that comes later waits for them. So a prompt stays with the server
        that has read it while all are busy, and is read once more by one that would stand idle.
        """
        costs = {server: server.to_read(reading) for server in self._servers}
        least = min(costs.values())

        def rank(server: Replica) -> tuple[bool, bool, bool, int, int]:
            tokens, requests = server.load
            again = 2 * (costs[server] - least) if requests or tokens else 0
            tokens += costs[server] + again
            return server.on_trial, server.resting, server is avoid, tokens, requests

        return min(self._servers, key=rank)

    async def _retried(
        self,
        call: Callable[[Replica], Awaitable[T]],
        reading: Reading,
        hedge: bool = False,
        divisible: bool = False,
        retries: int | None = None,
        avoid: Replica | None = None,
    ) -> T:
        """Run `call` on a server; again, elsewhere if possible, when it fails. With `hedge`, on two
        at once when the first takes long: for questions that may be asked twice.

        A server that is busy (429) is asked again, after a pause, for up to ten deadlines: that is
        no failure. Neither is to have waited at a server that then failed others, as long as
        another is well. With `divisible` a deadline that was missed is the caller's to deal with.
        `retries`: None is the teacher's. `avoid`: a server that has just failed.
        """
        self._open()
        server = avoid
        retries = self._retries if retries is None else retries
        attempt = busy = 0
        patience_ends = time.monotonic() + _BUSY_DEADLINES * self._timeout_s
        while True:
            server = self._least_loaded(reading, avoid=server)
            try:
                if server.on_trial:
                    await self._stand_trial(server)
                if hedge and self._hedge_after_s is not None and len(self._servers) > 1:
                    after_s = self._hedge_after_s
                    if self._hedge_quantile is not None:
                        after_s = max(after_s, self.stats.latency_s(self._hedge_quantile))
                    return await self._raced(call, server, reading, after_s)
                return await self._on(call, server, server.gets(reading))
            except RequestError as error:
                error.at = server
                if isinstance(error, FellIll) and not all(s.on_trial for s in self._servers):
                    continue  # another may do it, and none of its tries was made
                if error.cause == BUSY and time.monotonic() < patience_ends:
                    busy += 1
                    await self._wait_while_busy(error, busy)
                    continue
                late = divisible and error.cause == "timeout"
                helps = error.retry or (error.refused and self._someone_accepts())
                if late or not helps or attempt >= retries:
                    raise
                self.stats.retries += 1
            await asyncio.sleep(_pause_s(attempt) * random.uniform(0.5, 1.5))
            attempt += 1

    def _someone_accepts(self) -> bool:
        """Whether a server may be well that is not known to refuse the token."""
        return any(not server.refuses_token and not server.on_trial for server in self._servers)

    async def _on(
        self,
        call: Callable[[Replica], Awaitable[T]],
        server: Replica,
        tokens: int,
        sent: Callable[[], None] = lambda: None,
        expected: bool = False,
    ) -> T:
        """Run `call` on this server as soon as it has room, and count how it went; `sent` is told
        when its turn has come. `expected`: see `Replica.admitted`."""
        try:
            async with server.admitted(tokens, expected=expected):
                if server.on_trial:
                    raise FellIll(server)
                sent()
                begin = time.perf_counter()
                try:
                    result = await call(server)
                except RequestError as error:
                    if error.cause == "timeout":
                        server.took_too_long()
                    raise
                self.stats.request_done(time.perf_counter() - begin)
                server.succeeded(tokens)
                return result
        except RequestError as error:
            if (error.retry or error.refused) and error.blames:
                server.failed(error.detail)
            server.refuses_token |= error.refused
            if error.cause == "connection" or error.cause.startswith("http 5"):
                server.went_away()
            raise

    async def _raced(
        self,
        call: Callable[[Replica], Awaitable[T]],
        server: Replica,
        reading: Reading,
        after_s: float,
    ) -> T:
        """Run `call` on `server`; `after_s` after it was sent, also on another that is idle."""
        turn = asyncio.Event()
        tokens = server.gets(reading)
        server.tokens_waiting += tokens  # now: the task begins after others have chosen a server
        first = asyncio.ensure_future(self._on(call, server, tokens, turn.set, expected=True))
        waiting = asyncio.ensure_future(turn.wait())
        second: asyncio.Future[T] | None = None
        try:
            await asyncio.wait({first, waiting}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({first}, timeout=after_s)
            while not first.done() and (other := self._idle_beside(server)) is None:
                await asyncio.wait({first}, timeout=_LOOK_AGAIN_S)
            if first.done():
                return first.result()
            assert other is not None
            self.stats.hedges += 1
            second = asyncio.ensure_future(self._on(call, other, other.gets(reading)))
            return await self._first_good(first, second, server, other, after_s)
        finally:
            tasks = [task for task in (waiting, first, second) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # also of what failed unheard

    async def _first_good(
        self,
        first: asyncio.Future[T],
        second: asyncio.Future[T],
        slow: Replica,
        other: Replica,
        after_s: float,
    ) -> T:
        """The answer that comes first; where one request fails, the other's, whatever it is."""
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        # Of two that are done at once either will do.
        if first.done() and first.exception() is None:
            return first.result()
        if second.done() and second.exception() is None:
            self.stats.hedges_won += 1
            if not first.done():
                slow.failed(
                    f"{slow.url} had not answered {after_s:.3g} s after it was asked, "
                    f"when {other.url} was asked the same, and had"
                )
            return second.result()
        return await (second if first.done() else first)

    def _idle_beside(self, server: Replica) -> Replica | None:
        """Another server that is well and has nothing to do: a second request takes nobody's
        place there."""
        for other in self._servers:
            well = other is not server and not other.on_trial and not other.failures_in_a_row
            if well and other.load == (0, 0):
                return other
        return None

    async def _stand_trial(self, server: Replica) -> None:
        """Wait for the server's rest to end, then let one request ask whether it is well, for all
        that wait. Raises RequestError when it is not."""
        await asyncio.sleep(server.rest_left_s)
        async with server.trial:
            if not server.on_trial:
                return  # another request found it well
            if server.resting:
                raise FellIll(server)
            try:
                await require_same_model(self._quick, server)
            except RequestError as error:
                if error.retry or error.refused:
                    server.failed(error.detail)
                raise
            server.passed_trial()

    def _describe(self, error: RequestError) -> str:
        tries = f", tried {self._retries + 1} times" if error.retry and self._retries else ""
        return f"teacher {self.name!r}: {error.detail}{tries}"


def _pause_s(tries: int) -> float:
    """Before the next try, after `tries` more than the first."""
    return min(_BACKOFF_MAX_S, _BACKOFF_S * 2 ** min(tries, 10))
