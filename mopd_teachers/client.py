"""Client of one teacher: scores and generates by token ids, over one or several vLLM servers.

Everything is keyed by sample id (see `scores` for what a score is and must pass).

Two ways to the same numbers, chosen once, by asking each server in `probe`: our own route
(`wire`, many sequences a request, arrays) or the `/v1/completions` of any vLLM server (one
sequence a request, `prompt_logprobs`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from mopd_teachers import wire
from mopd_teachers.batches import Batches
from mopd_teachers.cache import ScoreCache, content_key
from mopd_teachers.errors import TeacherError
from mopd_teachers.generation import Generation, generate_at, sample_seed
from mopd_teachers.prefixes import Reading
from mopd_teachers.probes import ProbeReport
from mopd_teachers.replica import Endpoint, Replica
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure, TeacherScore, size_of
from mopd_teachers.transport import RequestError

__all__ = ["Endpoint", "Generation", "ProbeReport", "TeacherClient", "sample_seed"]

PROMPTS_PER_REQUEST = 64


class TeacherClient(Batches):
    """Speaks to the servers of one teacher.

    `timeout_s` is the deadline of each HTTP request, `retries` how often a request is tried
    again, on another server where there is one, `concurrency` how many requests one server has
    at a time (fewer where so many could not all meet their deadlines: see `Replica`).
    `hedge_after_s`, `hedge_quantile`: see `dispatch`. `cache_bytes` > 0 keeps scores for when the
    same tokens are asked about again; every server must then say when it was restarted, as ours do.
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
        if self.max_model_len is not None and size_of(item) + 1 > self.max_model_len:
            return TeacherFailure(
                "too long",
                f"sample {item.sample_id}: {size_of(item)} tokens (+ 1) do not fit teacher "
                f"{self.name!r}'s context of {self.max_model_len}",
            )
        return None

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
                lambda server: generate_at(self._ask, server, chunk, **how), Reading()
            )

        try:
            parts = await asyncio.gather(*(one(i) for i in range(0, len(prompts), size)))
        except RequestError as error:
            raise TeacherError(self._describe(error)) from error
        return [generation for part in parts for generation in part]
