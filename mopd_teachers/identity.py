"""Is a server still the teacher that it was? Asked of every server that comes, or comes back.

A teacher is known by what it gives the probe's tokens. A server of ours also says which start of
it answers, so that one that was restarted, under the same name and perhaps with other weights, is
found by its next answer and probed before anything of it counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from mopd_teachers import wire
from mopd_teachers.cache import ScoreCache
from mopd_teachers.dispatch import Dispatcher, FellIll
from mopd_teachers.errors import TeacherError
from mopd_teachers.probes import Needs, ProbeReport, probe_server, require_same_model
from mopd_teachers.replica import UNKNOWN, Endpoint, Replica
from mopd_teachers.together import all_of
from mopd_teachers.transport import Ask, RequestError
from mopd_teachers.waiting import wait_until_there
from mopd_teachers.watching import Watch

_SAME_MODEL = 0.25
"""Nats, on average over tokens at random, where two models differ by whole ones. In half precision
a router's near-tie moves single tokens by a nat, which says nothing."""
_SAME_SCORES = 1e-4
"""Nats, at most: past that, scores that are kept may be another model's."""

WRONG_TOKEN = (
    "It does not accept the token that it is sent, or is sent none: that is the value of the "
    "environment variable that the teacher's api_key_env names"
)


class KnownServers(Dispatcher):
    """A `Dispatcher` whose servers are all of one model, and the scores kept of that model."""

    def __init__(
        self,
        name: str,
        endpoints: Sequence[Endpoint],
        *,
        timeout_s: float = 60.0,
        retries: int = 2,
        concurrency: int = 64,
        hedge_after_s: float | None = None,
        hedge_quantile: float | None = None,
        cache_bytes: int = 0,
    ) -> None:
        super().__init__(
            name,
            endpoints,
            timeout_s=timeout_s,
            retries=retries,
            concurrency=concurrency,
            hedge_after_s=hedge_after_s,
            hedge_quantile=hedge_quantile,
        )
        self._needs = Needs()
        self._known: np.ndarray | None = None
        """What the teacher gives the probe's tokens: any server of it must give the same."""
        self._cache = ScoreCache(cache_bytes) if cache_bytes else None
        self._watches: dict[Replica, Watch] = {}
        """Of servers that do not say when they were restarted."""

    async def close(self) -> None:
        for server in list(self._watches):
            self._unwatch(server)
        await super().close()

    @property
    def max_model_len(self) -> int | None:
        """Shortest context of the servers, in tokens; None before `probe`."""
        return min((s.max_model_len for s in self._servers if s.max_model_len), default=None)

    async def probe(
        self,
        *,
        top_k: int = 0,
        candidates: bool = False,
        wait_s: float = 0.0,
        told: Callable[[str], None] = lambda text: None,
    ) -> ProbeReport:
        """Ask every server who it is and what it can do, and check that it knows something.

        `top_k` and `candidates` say what will be asked of it later. Servers that are still loading
        are waited for up to `wait_s` seconds, of which `told` hears (see `waiting`). Raises
        TeacherError when one cannot do what is needed, does not answer, serves another model, gives
        different scores for the same tokens, or gives (about) the same score to every token: the
        sign of a model whose weights are gone, log p = -ln V.
        """
        self._open()
        self._needs = Needs(top_k, candidates)

        async def probed(server: Replica) -> np.ndarray:
            if wait_s > 0:
                await wait_until_there(self._quick, server, self.name, wait_s, told)
            return await self._probe(server)

        scores = await all_of([probed(server) for server in self._servers])
        self._known = scores[0]
        if self._cache is not None:
            self._cache.forget()
        for server, own in zip(self._servers, scores, strict=True):
            self._require_same(server, own)
        models = tuple(server.model or "" for server in self._servers)
        assert self.max_model_len is not None
        able = frozenset.intersection(*(server.capabilities for server in self._servers))
        return ProbeReport(models, self.max_model_len, all(s.fast for s in self._servers), able)

    async def _probe(self, server: Replica) -> np.ndarray:
        try:
            scores = await self._asked(self._again, server)
        except RequestError as error:
            if error.refused:
                raise TeacherError(
                    f"teacher {self.name!r}: {error.detail}. {WRONG_TOKEN}"
                ) from error
            raise TeacherError(
                f"{self._describe(error)}. Is the server running, and is it vLLM?"
            ) from error
        if self._cache is not None and server.instance is None:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url} does not say when it was restarted, so that "
                "scores kept from before could be another model's; leave the cache off, or serve "
                "the teacher by `mopd teachers serve`"
            )
        return scores

    async def _asked(self, ask: Ask, server: Replica) -> np.ndarray:
        """Its scores of the probe's tokens (see `probe_server`), by the process that is watched
        from here on."""
        if not server.fast and not server.instance:
            watch = await Watch.begin(server, self._watches.get(server))
            if watch is None:
                self._watches.pop(server, None)
            else:
                self._watches[server] = watch
        scores = await probe_server(ask, server, self.name, self._needs)
        if server.instance is not None:
            self._unwatch(server)
        return scores

    def _unwatch(self, server: Replica) -> None:
        if (watch := self._watches.pop(server, None)) is not None:
            watch.end()

    async def revive(self, index: int) -> bool:
        """Whether this server answers and serves its model; if so it takes requests again."""
        server = self._servers[index]
        self._open()
        try:
            await require_same_model(self._quick, server)
            self._require_same(server, await self._asked(self._ask, server))
        except (RequestError, TeacherError) as error:
            server.last_error = str(error)
            server.refuses_token = isinstance(error, RequestError) and error.refused
            return False
        server.recovered()
        return True

    # ---- servers that come and go -----------------------------------------------------------

    async def replace_endpoint(self, index: int, endpoint: Endpoint) -> None:
        """Put a restarted server in the place of the one that died, after probing it.

        Raises TeacherError, and keeps the old one, when the new one does not pass, or serves
        another model than the teacher was.
        """
        new = await self._probed(endpoint)
        self._unwatch(self._servers[index])
        self._servers[index] = new

    async def add_endpoint(self, endpoint: Endpoint) -> None:
        """One server more, after probing it.

        Raises TeacherError when it does not pass, or serves another model than the others.
        """
        server = self._replica(endpoint)
        if any(server.url == each.url for each in self._servers):
            raise TeacherError(f"teacher {self.name!r}: {server.url} is one of its servers already")
        self._servers.append(await self._probed(endpoint))

    async def remove_endpoint(self, index: int) -> None:
        """Give this server no further request; returns when it has none in flight."""
        if len(self._servers) == 1:
            raise TeacherError(f"teacher {self.name!r}: its only server cannot be removed")
        server = self._servers.pop(index)
        self._unwatch(server)
        await server.idle()

    async def _probed(self, endpoint: Endpoint) -> Replica:
        self._open()
        server = self._replica(endpoint)
        self._require_same(server, await self._probe(server))
        return server

    def _require_same(self, server: Replica, scores: np.ndarray) -> None:
        """TeacherError unless these scores of the probe are the teacher's; what is kept is
        forgotten where they are not the very same."""
        known = scores if self._known is None else self._known
        difference = np.abs(scores - known)
        if difference.mean() > _SAME_MODEL:
            server.instance = UNKNOWN  # whatever it answers next, it is probed before
            raise TeacherError(
                f"teacher {self.name!r}: {server.url} scores the same tokens "
                f"{difference.mean():.2g} nats apart, on average, from what this teacher gave "
                "them; expected servers of one model"
            )
        if difference.max() > _SAME_SCORES and self._cache is not None:
            self._cache.forget()
        watch = self._watches.get(server)
        if watch is None or watch.holds or watch.useless:  # else another process came meanwhile
            server.vouch()

    async def _vouched(self, server: Replica) -> None:
        """A server that does not say when it was restarted is probed again when it was away, or
        answers as another than it was, and now and then: another model may have taken its place,
        under the same name. For that one failure among the probe's answers is not enough."""
        if server.instance is not None or server.vouched:
            return
        async with server.meeting:  # one asks for all
            for attempt in range(self._retries + 1):
                if server.vouched:
                    return
                if server.on_trial:  # as those found that came before
                    raise FellIll(server)
                try:
                    await self._meet_again(server)
                    return
                except RequestError as error:
                    if not error.retry or attempt == self._retries:
                        raise

    async def _same_as_kept(self) -> None:
        """Ask every server whether it is still the process that was probed; one that is not is
        probed again. What is kept is forgotten where that cannot be said."""

        async def same(server: Replica) -> bool:
            try:
                described = await self._quick(server, "GET", wire.PATH)
                if described.get("instance") != server.instance:
                    await self._meet_again(server)
                return True
            except (RequestError, TeacherError, AttributeError):
                return False

        asked = [server for server in self._servers if not server.on_trial]
        if not all(await asyncio.gather(*map(same, asked))) or not asked:
            assert self._cache is not None
            self._cache.forget()

    async def _restarted(self, server: Replica) -> None:
        """It answered as another process than the one that was probed."""
        await (self._vouched(server) if server.instance is None else self._meet_again(server))

    async def _meet_again(self, server: Replica) -> None:
        """A server was restarted: is it still the teacher? RequestError when it is not."""
        try:
            self._require_same(server, await self._asked(self._ask, server))
        except TeacherError as error:
            if self._cache is not None:
                self._cache.forget()
            raise RequestError("stranger", str(error), True) from error
