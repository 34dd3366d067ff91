"""One teacher kept answering: what happens, in order, when a sample gets no score.

the client:   try again, on another replica where there is one; a replica that fails again and
              again is left alone for a while
the keeper:   restart servers of ours that died or hang, within `max_restarts`; beside the run
              while other servers of the teacher answer
              when no server is left that answers, or that accepts the token: pause, with a
              message, up to `pause_s`
then:         the samples have no score; the loop masks them, counts them by cause, and stops
              the run when a step loses more than its budget
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from mopd.config.schema import TeacherConfig
from mopd.runtime.teacher_actor import ManagedReplica, pinned_revision
from mopd_teachers.batches import is_servers_fault
from mopd_teachers.client import TeacherClient
from mopd_teachers.errors import TeacherError as ServerError
from mopd_teachers.replica import FAILURES_TO_REST, Endpoint
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure

POLL_S = 2.0
REMIND_S = 30.0
CHANGED_S = 5.0
"""While the run waits: between two notes of the same trouble, and of another."""


class TeacherKeeper:
    """A teacher's client, and its servers as far as they are ours."""

    def __init__(
        self,
        name: str,
        config: TeacherConfig,
        client: TeacherClient,
        managed: Sequence[ManagedReplica],
        note: Callable[[str], None],
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """`managed` are the servers of ours, in the order of the client's; none if external.
        `note` is told, in words, what the user should know. `waiting` is called now and then while
        the run waits for this teacher: another server of it may have been asked for."""
        self.name, self.config, self.client = name, config, client
        self.managed: list[ManagedReplica | None] = list(managed) or [None] * len(client.servers)
        """The owner of each of the client's servers; None for one that is not ours."""
        self._note, self._waiting = note, waiting
        self._paused = False
        self._revision = pinned_revision(config)
        self._mending: asyncio.Lock | None = None
        self._mended = 0  # how often something that had failed was put right
        self._given_up = False
        self._healing: asyncio.Future[bool] | None = None
        self.restarts, self.paused_s = 0, 0.0

    async def score(self, items: Sequence[ScoreItem], top_k: int) -> dict[str, Outcome]:
        """Each sample's score or why it has none; after the policy of the module text."""
        before = self._mended
        scores = await self.client.score_batch(items, top_k=top_k)
        lost = [item for item in items if _lost(scores[item.sample_id])]
        if lost and await self._mend(before):
            scores |= await self.client.score_batch(lost, top_k=top_k)
            lost = [item for item in lost if _lost(scores[item.sample_id])]
        if not lost:
            self._given_up = False
        self._heal()
        return scores

    def _heal(self) -> None:
        """A server of ours that is down while others do its work is put right beside the run."""
        down = any(
            replica is not None and server.failures_in_a_row >= FAILURES_TO_REST
            for server, replica in zip(self.client.servers, self.managed, strict=False)
        )
        if down and (self._healing is None or self._healing.done()):
            self._healing = asyncio.ensure_future(self._mend(self._mended))

    def metrics(self) -> dict[str, float]:
        """The client's, and: restarts, paused_s."""
        own = {"restarts": float(self.restarts), "paused_s": self.paused_s}
        return self.client.metrics() | own

    async def close(self) -> None:
        """End the servers of ours and the connections; returns when none is left."""
        if self._healing is not None:
            self._healing.cancel()
        await asyncio.gather(
            self.client.close(), *(m.stop() for m in self.managed if m), return_exceptions=True
        )

    async def add(self, endpoint: Endpoint | None, start: Callable[[], ManagedReplica]) -> str:
        """One server more: the one at `endpoint`, or one that is started; returns its URL.

        Raises TeacherError (of mopd_teachers) when it is not the same teacher.
        """
        replica = None
        try:
            if endpoint is None:
                replica = start()
                endpoint = await replica.start()
            await self.client.add_endpoint(endpoint)
        except BaseException:
            if replica is not None:
                await replica.stop()
            raise
        self.managed.append(replica)
        return endpoint.url

    async def remove(self, url: str) -> None:
        """One server less, after what it has in flight; ended if it is ours.

        Raises TeacherError (of mopd_teachers) when it has no such server, or no other.
        """
        if self._paused:
            raise ServerError(
                f"teacher {self.name!r}: none of its servers answers and the run waits for one; "
                "add one, then remove this one"
            )
        self._mending = self._mending or asyncio.Lock()
        async with self._mending:  # a restart under way counts on the places of the servers
            urls = [server.url for server in self.client.servers]
            if url not in urls:
                raise ServerError(f"teacher {self.name!r} has no server {url!r}; it has {urls}")
            index = urls.index(url)
            removing = asyncio.ensure_future(self.client.remove_endpoint(index))
            await asyncio.sleep(0)  # the client's list is shorter now, and so must this one be
            replica = None
            if len(self.client.servers) < len(self.managed):
                replica = self.managed.pop(index)
        await removing
        if replica is not None:
            await replica.stop()

    def row(self) -> dict[str, Any]:
        """For people and for files: who it is and how its servers do."""
        config = self.config
        revision = self._revision or config.revision
        what = config.model or "whatever its servers serve"
        if revision:
            what += f" at {revision}"
        servers = [
            {
                "url": server.url,
                "model": server.model,
                "ours": replica is not None,
                "state": server.state,
                "in_flight": server.in_flight,
                "tokens_per_s": server.tokens_per_s,
                "last_error": server.last_error,
            }
            for server, replica in zip(self.client.servers, self.managed, strict=True)
        ]
        return {
            "name": self.name,
            "what": what,
            "model": config.model,
            "revision": revision,
            "servers": servers,
            "restarts": self.restarts,
            "paused_s": self.paused_s,
        }

    async def _mend(self, before: int) -> bool:
        """Whether it is worth asking again: something was put right since `before` was read, by
        this call or by another one that failed at the same time."""
        self._mending = self._mending or asyncio.Lock()
        async with self._mending:
            if self._mended > before:
                return True
            mended = await self._put_right()
            if not mended and all(server.failures_in_a_row for server in self.client.servers):
                mended = await self._pause()
            self._mended += mended
            return mended

    async def _put_right(self) -> bool:
        """Ask every server that failed whether it is well now, and restart ours if not."""
        done = False
        for index, server in enumerate(self.client.servers):
            ours = self.managed[index]
            dead = ours is not None and not await ours.alive()
            if not dead and not server.failures_in_a_row:
                continue
            if not dead and await self.client.revive(index):
                done = True
            elif ours is not None:
                done |= await self._restart(index, ours, "has died" if dead else "hangs")
        return done

    async def _restart(self, index: int, replica: ManagedReplica, why: str) -> bool:
        if self.restarts >= self.config.max_restarts:
            return False
        self.restarts += 1
        which = f"teacher {self.name}" + (f" (server {index})" if len(self.managed) > 1 else "")
        self._note(
            f"{which}: its server {why}; restart {self.restarts} of {self.config.max_restarts}"
        )
        try:
            await self.client.replace_endpoint(index, await replica.start())
        except Exception as error:  # whatever it is, the run has other means: pause, mask, stop
            self._note(f"{which}: the restart failed: {error}")
            return False
        return True

    async def _pause(self) -> bool:
        """Wait for any server to come back; whether one did. Once in vain, not again until the
        teacher has answered."""
        if self._given_up or not self.config.pause_s:
            return False
        self._paused = True
        try:
            return await self._wait_for_one()
        finally:
            self._paused = False

    async def _wait_for_one(self) -> bool:
        begin = time.monotonic()
        reminded, said = begin - REMIND_S, ""
        while (waited := time.monotonic() - begin) < self.config.pause_s:
            silent, why = time.monotonic() - reminded, self._trouble("")
            if silent >= REMIND_S or (why != said and silent >= CHANGED_S):
                reminded, said = time.monotonic(), why
                so_far = f"the run waits ({waited:.0f} of {self.config.pause_s:g} s)"
                self._note(f"teacher {self.name}: {self._trouble(so_far)}")
            self._waiting()
            await asyncio.sleep(min(POLL_S, self.config.pause_s - waited))
            added = any(not server.failures_in_a_row for server in self.client.servers)
            if added or await self._put_right():
                self.paused_s += time.monotonic() - begin
                self._note(f"teacher {self.name}: answers again")
                return True
        self.paused_s += time.monotonic() - begin
        self._given_up = True
        self._note(f"teacher {self.name}: did not come back; its samples are masked and counted")
        return False

    def _trouble(self, so_far: str) -> str:
        """Why nothing is scored, and what can be done about it."""
        refusing = [server.url for server in self.client.servers if server.refuses_token]
        if not refusing:
            last = next((s.last_error for s in self.client.servers if s.last_error), "")
            return (
                f"none of its servers answers, {so_far}; bring one back under the same address, "
                f"add another (mopd teachers add), or end the run: {last}"
            )
        variable = self.config.api_key_env
        if variable is None:
            sent, instead = f"none: teachers.{self.name} names no api_key_env", ""
        else:
            sent = f"the value that {variable} had when the run began"
            instead = f", set {variable}, and go on with resume=true"
        return (
            f"its token ({sent}) is refused by {', '.join(refusing)}, {so_far}; let the server "
            f"accept it again, add one that does (mopd teachers add), or end the run{instead}"
        )


def _lost(outcome: Outcome) -> bool:
    return isinstance(outcome, TeacherFailure) and is_servers_fault(outcome.cause)
