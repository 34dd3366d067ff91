"""One server of a teacher in use: what it can do, how much it has to do, and whether it is well.

A server that failed several times in a row *rests* (its circuit is open): requests go to the
others. After the rest one cheap question (is it still the same model?) decides whether it takes
requests again; each further failure doubles the rest.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mopd_teachers.errors import TeacherError
from mopd_teachers.prefixes import PrefixMemory, Reading

FAILURES_TO_REST = 3
REST_S = 1.0
REST_MAX_S = 30.0
FIRST_TOKENS = 16_384
"""In flight at a server whose speed is not known yet."""
UNKNOWN = ""
"""Instance of a server that must be probed before it is asked for scores."""
VOUCH_S = 10.0
"""How long the last probe speaks for a server that does not say when it was restarted."""
_SHARE_OF_DEADLINE = 0.25
_RATE_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one server is, and the name it must serve (None: whatever it serves, found out once).

    Replicas that were started here have a name each (`ServerProcess.served_name`).
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token; never shown."""


class Replica:
    """One endpoint in use."""

    def __init__(self, teacher: str, endpoint: Endpoint, timeout_s: float, concurrency: int):
        for problem in (url_problem(endpoint.url), key_problem(endpoint.api_key or "")):
            if problem is not None:
                raise TeacherError(f"teacher {teacher!r}: {problem}")
        self.url = bare_url(endpoint.url)
        self.model = endpoint.model
        self._key = endpoint.api_key
        self.headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self.fast: bool | None = None
        """Has our route; None: not asked yet."""
        self.instance: str | None = None
        """Which start of the server this is, where it says so."""
        self.fingerprints: set[str] = set()
        self.unmet: set[str] = set()
        """What its answers say of its configuration, in use; of those that were probed since, and
        of others."""
        self.capabilities: frozenset[str] = frozenset()
        self.max_model_len: int | None = None
        self.prefixes: PrefixMemory | None = None
        """What its prefix cache holds; None where scores do not come from there."""
        self._timeout_s, self._concurrency = timeout_s, concurrency
        # How well it is.
        self.failures_in_a_row = 0
        self.last_error = ""
        self.refuses_token = False
        self._rest_until, self._rests = 0.0, 0
        self._vouched_until = 0.0
        # How fast it is: tokens done and seconds busy, of about the last minute.
        self._done_tokens, self._busy_s, self._counted_to = 0.0, 0.0, 0.0
        self._most_tokens = math.inf  # in flight, as far as deadlines that were missed tell
        self.enter_loop()

    def without_key(self, text: str) -> str:
        """What a server said, should it say our key back."""
        return text.replace(self._key, "***") if self._key else text

    def enter_loop(self) -> None:
        """Nothing is in flight: a new event loop begins, to which the locks belong."""
        self.in_flight = 0
        self.tokens_in_flight = self.tokens_waiting = 0
        self.trial, self.meeting = asyncio.Lock(), asyncio.Lock()
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Requests that wait: tokens, and what tells each that its turn has come."""
        self._nothing_to_do = asyncio.Event()
        self._nothing_to_do.set()

    # ---- load -------------------------------------------------------------------------------

    @property
    def tokens_per_s(self) -> float | None:
        """Its speed, requests in flight together; None before anything was done."""
        return self._done_tokens / self._busy_s if self._done_tokens and self._busy_s > 0 else None

    @property
    def load(self) -> tuple[int, int]:
        """Tokens that it has to do and that wait for it, and requests in flight."""
        return self.tokens_in_flight + self.tokens_waiting, self.in_flight

    def to_read(self, reading: Reading) -> int:
        """Tokens that it has to compute for these sequences."""
        return reading.tokens if self.prefixes is None else self.prefixes.to_read(reading)

    def gets(self, reading: Reading) -> int:
        """As `to_read`, of sequences that it now gets."""
        tokens = self.to_read(reading)
        if self.prefixes is not None:
            self.prefixes.sent(reading)
        return tokens

    @property
    def token_budget(self) -> int:
        """Tokens that it may have in flight so that each request can meet its deadline."""
        rate = self.tokens_per_s
        most = FIRST_TOKENS if rate is None else rate * self._timeout_s * _SHARE_OF_DEADLINE
        return max(1, int(min(most, self._most_tokens)))

    def took_too_long(self) -> None:
        """A request missed its deadline with all that is in flight now: that was too much."""
        self._most_tokens = max(1.0, self.tokens_in_flight / 2)
        self._forget_speed()

    @asynccontextmanager
    async def admitted(self, tokens: int, *, expected: bool = False) -> AsyncIterator[None]:
        """Wait until a request of this size may start; it counts as in flight inside. One that is
        larger than the budget goes alone. `expected`: it was counted as waiting already.

        In the order in which they came: a small one that overtook would be no small one, where it
        counts on the prompt that the one before it reads, and a large one might wait for ever.
        """
        if not expected:
            self.tokens_waiting += tokens
        turn = asyncio.get_running_loop().create_future()
        self._line.append((tokens, turn))
        self._nothing_to_do.clear()
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.tokens_waiting -= tokens
                self._admit()
            else:  # its turn came in the same moment
                self._leave(tokens)
            raise
        try:
            yield
        finally:
            self._leave(tokens)

    def _admit(self) -> None:
        """Let those begin for whom there is room."""
        while self._line:
            tokens, turn = self._line[0]
            if not turn.done():
                full = self.in_flight >= self._concurrency
                full |= self.in_flight > 0 and self.tokens_in_flight + tokens > self.token_budget
                if full:
                    return
                self._count_time()
                self.tokens_waiting -= tokens
                self.in_flight += 1
                self.tokens_in_flight += tokens
                turn.set_result(None)
            self._line.popleft()
        if not self.in_flight:
            self._nothing_to_do.set()

    def _leave(self, tokens: int) -> None:
        """A request that was in flight is over."""
        self._count_time()
        self.in_flight -= 1
        self.tokens_in_flight -= tokens
        self._admit()

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._nothing_to_do.wait()

    def _count_time(self) -> None:
        """Count what has passed since the last change, if there was anything to score in it."""
        now = time.monotonic()
        if self.tokens_in_flight:
            self._busy_s += now - self._counted_to
        self._counted_to = now
        if self._busy_s > _RATE_WINDOW_S:
            self._busy_s, self._done_tokens = self._busy_s / 2, self._done_tokens / 2

    # ---- health -----------------------------------------------------------------------------

    @property
    def resting(self) -> bool:
        return time.monotonic() < self._rest_until

    @property
    def rest_left_s(self) -> float:
        return max(0.0, self._rest_until - time.monotonic())

    @property
    def vouched(self) -> bool:
        """Whether the last probe still speaks for it."""
        return time.monotonic() < self._vouched_until

    def went_away(self) -> None:
        """Nobody was there, or nobody behind its gateway: whoever comes may be another model."""
        self._vouched_until = 0.0

    def vouch(self) -> None:
        """It was probed, and is the teacher."""
        self.fingerprints |= self.unmet
        self.unmet.clear()
        self._vouched_until = time.monotonic() + VOUCH_S

    @property
    def on_trial(self) -> bool:
        """It failed so often that it must prove itself before it takes another request."""
        return self.failures_in_a_row >= FAILURES_TO_REST

    @property
    def state(self) -> str:
        """``up``, ``failing`` (its last request failed) or ``down`` (rests, or is on trial)."""
        if self.on_trial:
            return "down"
        return "failing" if self.failures_in_a_row else "up"

    def failed(self, error: str) -> None:
        """One more request failed for a reason that is the server's."""
        self.failures_in_a_row += 1
        self.last_error = error
        if self.prefixes is not None:
            self.prefixes.forget()
        if self.on_trial and not self.resting:
            self._rest_until = time.monotonic() + min(REST_MAX_S, REST_S * 2.0**self._rests)
            self._rests = min(self._rests + 1, 10)

    def succeeded(self, tokens: int) -> None:
        """A request of this many tokens was answered."""
        self._done_tokens += tokens
        self._most_tokens *= 2
        self.recovered()

    def passed_trial(self) -> None:
        """It may take requests again; one more failure puts it to rest, longer than before."""
        self._forget_speed()
        self.failures_in_a_row, self._rest_until = FAILURES_TO_REST - 1, 0.0

    def recovered(self) -> None:
        """It has proven that it does its work."""
        if self.on_trial:
            self._forget_speed()
        self.failures_in_a_row, self._rest_until, self._rests, self.last_error = 0, 0.0, 0, ""
        self.refuses_token = False

    def _forget_speed(self) -> None:
        """The time that it was down says nothing of how fast it is."""
        self._done_tokens, self._busy_s = 0.0, 0.0


def bare_url(url: str) -> str:
    """A server's address as it is compared and shown, whichever way it was written."""
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def url_problem(url: str) -> str | None:
    """What keeps `url` from being a server's address. The text never shows a password."""
    if "@" in url:
        return (
            f"the endpoint at {url.rpartition('@')[2]} has a user or a password in its URL, which "
            "messages and files would show; put a bearer token into the variable of api_key_env "
            "instead"
        )
    try:
        parts = urlsplit(url)
        wrong = parts.scheme.lower() not in ("http", "https") or not parts.hostname
        wrong |= parts.port == 0 or bool(parts.query or parts.fragment)
    except ValueError as error:
        return f"endpoint {url!r} is not a URL ({error}); write http://HOST:PORT"
    return f"endpoint {url!r} is not a URL; write http://HOST:PORT" if wrong else None


def key_problem(key: str) -> str | None:
    """What keeps `key` from travelling in a header as it is. The text never shows it."""
    if all("!" <= letter <= "~" for letter in key):
        return None
    return (
        "the bearer token has a blank, a line break or a letter outside ASCII in it, which does "
        "not travel in an HTTP header; is there a line break at its end?"
    )
