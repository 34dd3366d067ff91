"""A batch of samples as requests to a teacher's servers, and what becomes of those that fail.

A sample whose scores came back wrong is asked for again, elsewhere where there is another server.
What did not come in time comes again in parts that the server can do in time, so that neither a
slow server nor one long sample loses the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mopd_teachers.dispatch import DOWN
from mopd_teachers.identity import KnownServers
from mopd_teachers.prefixes import Reading, prompts_together
from mopd_teachers.replica import Replica
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure, TeacherScore, size_of
from mopd_teachers.scoring import RESTARTED, score_at
from mopd_teachers.together import all_of
from mopd_teachers.transport import REFUSED, RequestError

SEQUENCES_PER_REQUEST = 256
BYTES_PER_REQUEST = 64 << 20
"""Of a request, or of its answer: a quarter of what a server takes."""

ANSWERED_WRONG = frozenset(("bad scores", "wrong ids"))
"""Of samples that are asked for again: the fault may have been on the way, or the server's."""
SERVER_CAUSES = ANSWERED_WRONG | {
    "timeout",
    "connection",
    "bad answer",
    "stranger",
    RESTARTED,
    DOWN,
    *REFUSED,
}
_ONE_NUMBER = 1e-3
"""Nats: scores of different tokens that lie closer together than that are no scores, unless the
teacher is sure of every token."""
_SURE = -0.5
_ENOUGH = 8  # tokens


def is_servers_fault(cause: str) -> bool:
    """Whether a sample failed because a server did not do its work, so that a restart may help."""
    return cause in SERVER_CAUSES or cause.startswith("http 5")


class Batches(KnownServers):
    """`KnownServers` that score."""

    async def _scored(self, items: Sequence[ScoreItem], top_k: int) -> dict[str, Outcome]:
        """Scores from the servers."""
        parts = await all_of(
            self._score_chunk(chunk, top_k) for chunk in self._chunks(items, top_k)
        )
        return {key: outcome for part in parts for key, outcome in part.items()}

    def _chunks(self, items: Sequence[ScoreItem], top_k: int) -> Iterator[list[ScoreItem]]:
        """With our route: large requests, but work for every server, and none so large that its
        answer could not come in time, or that it would be refused for its bytes; samples of one
        long prompt together. Else one sample a request."""
        fast = all(s.fast for s in self._servers)
        most = min(SEQUENCES_PER_REQUEST, math.ceil(len(items) / len(self._servers))) if fast else 1
        tokens = min(s.token_budget for s in self._servers) // 2
        chunk: list[ScoreItem] = []
        size = weight = 0
        for group in self._groups(items):
            parted = len(chunk) + len(group) > most  # unless it begins a request
            for item in group:
                own = size_of(item), _bytes_of(item, top_k)
                full = size + own[0] > tokens or weight + own[1] > BYTES_PER_REQUEST
                if chunk and (full or len(chunk) == most or parted):
                    yield chunk
                    chunk, size, weight = [], 0, 0
                parted = False
                chunk.append(item)
                size, weight = size + own[0], weight + own[1]
        if chunk:
            yield chunk

    def _groups(self, items: Sequence[ScoreItem]) -> list[list[ScoreItem]]:
        """What should go to one server; by itself each where no server has a prefix cache."""
        blocks = [s.prefixes.block for s in self._servers if s.prefixes is not None]
        return prompts_together(items, min(blocks)) if blocks else [[item] for item in items]

    async def _score_chunk(
        self,
        chunk: Sequence[ScoreItem],
        top_k: int,
        *,
        retries: int | None = None,
        avoid: Replica | None = None,
    ) -> dict[str, Outcome]:
        """One request's samples. Those whose scores came back wrong are asked for again, elsewhere
        where there is another server; what took too long comes again in smaller parts."""
        good: dict[str, Outcome] = {}
        wrong: dict[str, TeacherFailure] = {}

        async def ask(server: Replica) -> None:
            left = [item for item in chunk if item.sample_id not in good]
            outcomes = await self._score_at(server, left, top_k)
            for key, outcome in outcomes.items():
                if isinstance(outcome, TeacherFailure) and outcome.cause in ANSWERED_WRONG:
                    wrong[key] = outcome
                else:
                    good[key] = outcome
            bad = [wrong[i.sample_id] for i in left if i.sample_id not in good]
            if bad:  # of few it may be the samples themselves that have no scores, and of one
                blames = len(chunk) > 1 and 2 * len(bad) > len(chunk)
                raise RequestError(bad[0].cause, bad[0].detail, True, blames=blames)

        try:
            divisible = len(chunk) > 1 and self._retries > 0
            await self._retried(
                ask,
                Reading(chunk),
                hedge=True,
                divisible=divisible,
                retries=retries,
                avoid=avoid,
            )
        except RequestError as error:
            left = [item for item in chunk if item.sample_id not in good]
            if divisible and error.cause == "timeout":
                return good | await self._smaller(left, top_k, error.at)
            if error.cause in ANSWERED_WRONG and len(chunk) == 1 and error.at is not None:
                error.at.failed(error.detail)  # after all tries
            failure = TeacherFailure(error.cause, self._describe(error))
            for item in left:
                good[item.sample_id] = wrong.get(item.sample_id, failure)
        return good

    async def _smaller(
        self, items: Sequence[ScoreItem], top_k: int, slow: Replica | None
    ) -> dict[str, Outcome]:
        """Scores of what took too long together: the shortest alone, which tells a slow server from
        one that hangs; if it has its score, the others in as large parts as that speed allows."""
        self.stats.retries += 1
        shortest = min(items, key=size_of)
        first = await self._score_chunk([shortest], top_k, retries=self._retries - 1, avoid=slow)
        outcome = first[shortest.sample_id]
        if isinstance(outcome, TeacherFailure) and is_servers_fault(outcome.cause):
            return {item.sample_id: outcome for item in items}
        rest = [item for item in items if item is not shortest]
        return first | await self._scored(rest, top_k)

    async def _score_at(
        self, server: Replica, chunk: Sequence[ScoreItem], top_k: int
    ) -> dict[str, Outcome]:
        await self._vouched(server)
        try:
            outcomes = await score_at(self._ask, server, chunk, top_k)
        except RequestError as error:
            if error.cause != RESTARTED:
                raise
            await self._restarted(server)
            outcomes = await score_at(self._ask, server, chunk, top_k)
        found = [each for each in outcomes.values() if isinstance(each, TeacherScore)]
        self.stats.prefix_tokens += sum(score.cached_tokens for score in found)
        if says_one_number(outcomes):  # of a model that has lost its weights while it ran
            await self._meet_again(server)
        return outcomes


def says_one_number(outcomes: Mapping[str, Outcome]) -> bool:
    """Whether all tokens have about the same logprob, far from 0."""
    found = [each.logprobs for each in outcomes.values() if isinstance(each, TeacherScore)]
    tokens = np.concatenate(found) if found else np.empty(0, np.float32)
    if len(tokens) < _ENOUGH:
        return False
    return float(np.ptp(tokens)) < _ONE_NUMBER and float(tokens.mean()) < _SURE


def _bytes_of(item: ScoreItem, top_k: int) -> int:
    """What a sample takes in a request or, with its candidates' ids and logprobs, in the answer."""
    width = top_k if item.candidate_ids is None else item.candidate_ids.shape[1]
    return 4 * size_of(item) + 8 * len(item.response_ids) * (1 + width)
