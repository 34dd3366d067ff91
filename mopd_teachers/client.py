"""Client of one teacher: scores and generates by token ids, over one or several vLLM servers.

Everything is keyed by sample id (see `scores` for what a score is and must pass).

Two ways to the same numbers, chosen once, by asking each server in `probe`: our own route
(`wire`, many sequences a request, arrays) or the `/v1/completions` of any vLLM server (one
sequence a request, `prompt_logprobs`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mopd_teachers import wire
from mopd_teachers.cache import ScoreCache, content_key
from mopd_teachers.dispatch import DOWN
from mopd_teachers.errors import TeacherError
from mopd_teachers.generation import Generation, generate_at, sample_seed
from mopd_teachers.identity import KnownServers
from mopd_teachers.probes import ProbeReport
from mopd_teachers.replica import Endpoint, Replica
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure, TeacherScore
from mopd_teachers.scoring import RESTARTED, score_at
from mopd_teachers.transport import RequestError

__all__ = ["Endpoint", "Generation", "ProbeReport", "TeacherClient", "sample_seed"]

SEQUENCES_PER_REQUEST = 256
PROMPTS_PER_REQUEST = 64

ANSWERED_WRONG = frozenset(("bad scores", "wrong ids"))
"""Of samples that are asked for again: the fault may have been on the way, or the server's."""
SERVER_CAUSES = ANSWERED_WRONG | {
    "timeout",
    "connection",
    "bad answer",
    "stranger",
    RESTARTED,
    DOWN,
}
_ONE_NUMBER = 1e-3
"""Nats: scores of different tokens that lie closer together than that are no scores, unless the
teacher is sure of every token."""
_SURE = -0.5
_ENOUGH = 8  # tokens


def is_servers_fault(cause: str) -> bool:
    """Whether a sample failed because a server did not do its work, so that a restart may help."""
    return cause in SERVER_CAUSES or cause.startswith("http 5")


class TeacherClient(KnownServers):
    """Speaks to the servers of one teacher.

    `timeout_s` is the deadline of each HTTP request, `retries` how often a request is tried
    again, on another server where there is one, `concurrency` how many requests one server has
    at a time (fewer where so many could not all meet their deadlines: see `Replica`).
    `hedge_after_s`: see `dispatch`. `cache_bytes` > 0 keeps scores for when the same tokens are
    asked about again; every server must then say when it was restarted, as ours do.
    """

    async def __aenter__(self) -> TeacherClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- what is known of it ----------------------------------------------------------------

    @property
    def servers(self) -> Sequence[Replica]:
        """The servers, to look at."""
        return tuple(self._servers)

    def metrics(self) -> dict[str, float]:
        """Counters of this teacher (see `TeacherStats.snapshot`), and how its servers are."""
        states = [server.state for server in self._servers]
        speeds = [server.tokens_per_s or 0.0 for server in self._servers]
        return self.stats.snapshot() | {
            "servers": float(len(states)),
            "servers_up": float(states.count("up")),
            "servers_down": float(states.count("down")),
            "tokens_per_s": sum(speeds),
            "cached_gib": self._cache.bytes / 2**30 if self._cache is not None else 0.0,
        }

    # ---- scoring ----------------------------------------------------------------------------

    async def score_batch(
        self, items: Sequence[ScoreItem], *, top_k: int = 0
    ) -> dict[str, Outcome]:
        """Each sample's scores, or why there are none, by sample id.

        With `top_k` > 0, also of the teacher's likeliest ids at every response position; an item
        with `candidate_ids` gets those scored instead. Needs `probe` first (TeacherError
        otherwise). Never raises for a sample that fails.
        """
        self._open()
        if any(s.fast is None for s in self._servers):
            raise TeacherError(f"teacher {self.name!r}: call probe() before scoring")
        ids = [item.sample_id for item in items]
        if len(set(ids)) != len(ids):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            raise TeacherError(f"teacher {self.name!r}: sample ids given twice: {twice[:5]}")
        results: dict[str, Outcome] = {}
        live: list[ScoreItem] = []
        for item in items:
            refused = self._refuse(item, top_k)
            if refused is None:
                live.append(item)
            else:
                results[item.sample_id] = refused
        results |= await (self._scored(live, top_k) if self._cache is None
                          else self._from_cache(self._cache, live, top_k))  # fmt: skip
        for scores in results.values():
            if isinstance(scores, TeacherFailure):
                self.stats.failures[scores.cause] += 1
            else:
                self.stats.tokens += len(scores.logprobs)
        return results

    async def _scored(self, items: Sequence[ScoreItem], top_k: int) -> dict[str, Outcome]:
        """Scores from the servers."""
        parts = await asyncio.gather(
            *(self._score_chunk(chunk, top_k) for chunk in self._chunks(items))
        )
        return {key: outcome for part in parts for key, outcome in part.items()}

    async def _from_cache(
        self, cache: ScoreCache, items: Sequence[ScoreItem], top_k: int
    ) -> dict[str, Outcome]:
        """As `_scored`, with each different question asked once, and none whose answer is kept."""
        keys = {item.sample_id: content_key(item, top_k) for item in items}
        if any(cache.get(key) is not None for key in keys.values()):
            await self._same_as_kept()
        epoch = cache.epoch
        kept = {key: score for key in keys.values() if (score := cache.get(key)) is not None}
        asked: dict[bytes, ScoreItem] = {}
        for item in items:
            if keys[item.sample_id] not in kept:
                asked.setdefault(keys[item.sample_id], item)
        fresh = await self._scored(list(asked.values()), top_k)
        self.stats.cache_hits += len(items) - len(asked)
        for key, item in asked.items():
            outcome = fresh[item.sample_id]
            if isinstance(outcome, TeacherScore):
                cache.put(key, outcome, epoch)
        return {
            sample: kept[key] if key in kept else fresh[asked[key].sample_id]
            for sample, key in keys.items()
        }

    def _refuse(self, item: ScoreItem, top_k: int) -> TeacherFailure | None:
        """What needs no server to be seen as impossible."""
        given = item.candidate_ids
        if given is not None:
            if top_k:
                raise TeacherError(
                    f"teacher {self.name!r}: sample {item.sample_id} has candidate ids, and top_k "
                    f"is {top_k}; expected one of the two"
                )
            if given.ndim != 2 or len(given) != len(item.response_ids) or not given.shape[1]:
                raise TeacherError(
                    f"teacher {self.name!r}: sample {item.sample_id} has candidate ids of shape "
                    f"{given.shape}; expected [{len(item.response_ids)}, K]"
                )
            if not all(wire.CANDIDATES in s.capabilities for s in self._servers):
                return TeacherFailure(
                    "unsupported",
                    f"sample {item.sample_id}: a server of teacher {self.name!r} cannot score "
                    "given ids",
                )
        if not item.prompt_ids or not item.response_ids:
            return TeacherFailure(
                "empty",
                f"sample {item.sample_id}: {len(item.prompt_ids)} prompt and "
                f"{len(item.response_ids)} response ids; expected at least one of each",
            )
        # The server wants room for the one token that it has to generate.
        if self.max_model_len is not None and _size(item) + 1 > self.max_model_len:
            return TeacherFailure(
                "too long",
                f"sample {item.sample_id}: {_size(item)} tokens (+ 1) do not fit teacher "
                f"{self.name!r}'s context of {self.max_model_len}",
            )
        return None

    def _chunks(self, items: Sequence[ScoreItem]) -> Iterator[list[ScoreItem]]:
        """With our route: large requests, but work for every server, and none so large that its
        answer could not come in time. Else one sample a request."""
        fast = all(s.fast for s in self._servers)
        most = min(SEQUENCES_PER_REQUEST, math.ceil(len(items) / len(self._servers))) if fast else 1
        tokens = min(s.token_budget for s in self._servers) // 2
        chunk: list[ScoreItem] = []
        size = 0
        for item in items:
            if chunk and (len(chunk) == most or size + _size(item) > tokens):
                yield chunk
                chunk, size = [], 0
            chunk.append(item)
            size += _size(item)
        if chunk:
            yield chunk

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
            if bad:  # of few it may be the samples themselves that have no scores
                blames = 2 * len(bad) > len(chunk)
                raise RequestError(bad[0].cause, bad[0].detail, True, blames=blames)

        try:
            size = sum(map(_size, chunk))
            divisible = len(chunk) > 1 and self._retries > 0
            await self._retried(
                ask, size, hedge=True, divisible=divisible, retries=retries, avoid=avoid
            )
        except RequestError as error:
            left = [item for item in chunk if item.sample_id not in good]
            if divisible and error.cause == "timeout":
                return good | await self._smaller(left, top_k, error.at)
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
        shortest = min(items, key=_size)
        first = await self._score_chunk([shortest], top_k, retries=self._retries - 1, avoid=slow)
        outcome = first[shortest.sample_id]
        if isinstance(outcome, TeacherFailure) and is_servers_fault(outcome.cause):
            return {item.sample_id: outcome for item in items}
        rest = [item for item in items if item is not shortest]
        parts = await asyncio.gather(
            *(self._score_chunk(part, top_k) for part in self._chunks(rest))
        )
        return first | {key: each for part in parts for key, each in part.items()}

    async def _score_at(
        self, server: Replica, chunk: Sequence[ScoreItem], top_k: int
    ) -> dict[str, Outcome]:
        await self._vouched(server)
        try:
            outcomes = await score_at(self._ask, server, chunk, top_k)
        except RequestError as error:
            if error.cause != RESTARTED:
                raise
            await self._meet_again(server)
            outcomes = await score_at(self._ask, server, chunk, top_k)
        if _says_one_number(outcomes):  # of a model that has lost its weights while it ran
            await self._meet_again(server)
        return outcomes

    # ---- text and answers -------------------------------------------------------------------

    async def tokenize(self, text: str) -> list[int] | None:
        """Ids that the first server's tokenizer makes of `text`, without special tokens around
        it; None where the server does not say. Raises TeacherError when it does not answer."""
        server = self._servers[0]
        body = {"model": server.model, "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._ask(server, "POST", "/tokenize", body)
            return [int(token) for token in answer["tokens"]]
        except RequestError as error:
            if error.cause in ("http 404", "http 405", "http 501"):
                return None
            raise TeacherError(self._describe(error)) from error
        except (LookupError, TypeError, ValueError) as error:
            raise TeacherError(
                f"teacher {self.name!r}: {server.url}/tokenize answered without token ids"
            ) from error

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
    ) -> list[Generation]:
        """One answer per prompt, in their order; greedy at temperature 0.

        `seeds` has one of each prompt (see `sample_seed`), which is then a request of its own:
        the same call gives the same answers, and equal prompts are as many samples. None leaves
        the noise to the server.

        An answer ends at the model's end-of-sequence id or after `max_tokens`. Raises
        TeacherError when a server fails past the retries.
        """
        self._open()
        if any(s.model is None for s in self._servers):
            raise TeacherError(f"teacher {self.name!r}: call probe() before generating")
        if seeds is not None and len(seeds) != len(prompts):
            raise TeacherError(
                f"teacher {self.name!r}: {len(seeds)} seeds for {len(prompts)} prompts; expected "
                "one of each"
            )
        size = min(PROMPTS_PER_REQUEST, max(1, math.ceil(len(prompts) / len(self._servers))))
        size = size if seeds is None else 1

        async def one(start: int) -> list[Generation]:
            chunk = prompts[start : start + size]
            seed = None if seeds is None else seeds[start]
            how: dict[str, Any] = {
                "teacher": self.name, "max_tokens": max_tokens, "temperature": temperature,
                "seed": seed,
            }  # fmt: skip
            return await self._retried(
                lambda server: generate_at(self._ask, server, chunk, **how), 0
            )

        try:
            parts = await asyncio.gather(*(one(i) for i in range(0, len(prompts), size)))
        except RequestError as error:
            raise TeacherError(self._describe(error)) from error
        return [generation for part in parts for generation in part]


def _says_one_number(outcomes: Mapping[str, Outcome]) -> bool:
    """Whether all tokens have about the same logprob, far from 0."""
    found = [each.logprobs for each in outcomes.values() if isinstance(each, TeacherScore)]
    tokens = np.concatenate(found) if found else np.empty(0, np.float32)
    if len(tokens) < _ENOUGH:
        return False
    return float(np.ptp(tokens)) < _ONE_NUMBER and float(tokens.mean()) < _SURE


def _size(item: ScoreItem) -> int:
    return len(item.prompt_ids) + len(item.response_ids)
