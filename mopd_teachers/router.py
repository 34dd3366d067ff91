"""Each sample to the teacher of its own domain, by name; never to another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from mopd_teachers.client import ProbeReport, TeacherClient
from mopd_teachers.errors import TeacherError
from mopd_teachers.scores import Outcome, ScoreItem


class TeacherRouter:
    """Domains to teachers. Several domains may share a teacher."""

    def __init__(self, teachers: Mapping[str, TeacherClient]) -> None:
        self._teachers = dict(teachers)

    @property
    def clients(self) -> list[TeacherClient]:
        """Each teacher once."""
        return list({id(client): client for client in self._teachers.values()}.values())

    def client(self, domain: str) -> TeacherClient:
        """The domain's own teacher; TeacherError for a domain that has none."""
        try:
            return self._teachers[domain]
        except KeyError:
            raise TeacherError(
                f"domain {domain!r} has no teacher; known domains: {sorted(self._teachers)}"
            ) from None

    async def probe(self) -> dict[str, ProbeReport]:
        """Probe all teachers at once; reports by teacher name. Raises the first TeacherError."""
        clients = self.clients
        reports = await asyncio.gather(*(client.probe() for client in clients))
        return {c.name: report for c, report in zip(clients, reports, strict=True)}

    async def score(
        self, domain: str, items: Sequence[ScoreItem], *, top_k: int = 0
    ) -> dict[str, Outcome]:
        """Scores by sample id, from the domain's own teacher (see `TeacherClient.score_batch`)."""
        return await self.client(domain).score_batch(items, top_k=top_k)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Counters by teacher name (see `TeacherStats.snapshot`)."""
        return {client.name: client.metrics() for client in self.clients}

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))
