"""The run's teachers: servers under Ray supervision, and each domain's way to its own.

A managed teacher's servers are started by a Ray actor each, which owns the process, restarts it
when it died, and takes it along when the run ends. A teacher given by URLs is only asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from mopd.config.schema import Config, TeacherConfig
from mopd.errors import ModelError, TeacherError
from mopd.protocols import TeacherFailed
from mopd.runtime.startup import Startup
from mopd.types import Prompt, Rollout, TeacherScore, TopK, finish_reason
from mopd_teachers.client import Endpoint, TeacherClient
from mopd_teachers.errors import TeacherError as ServerError
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure
from mopd_teachers.server import ServerProcess, ServerSpec


@ray.remote
class TeacherActor:
    """Owns one server process; runs where Ray placed it, so that the server has its resources."""

    def __init__(self, spec: ServerSpec, log_path: Path) -> None:
        self._spec, self._log_path = spec, log_path
        self._server: ServerProcess | None = None

    def start(self, timeout_s: float) -> tuple[str, str]:
        """Start the server and wait until it answers; (URL, name it serves the model under)."""
        self._server = ServerProcess(self._spec, self._log_path)
        self._server.start()
        self._server.wait_healthy(timeout_s)
        return self._server.url, self._server.served_name

    def alive(self) -> bool:
        """Whether the process is there."""
        return self._server is not None and self._server.alive()

    def stop(self) -> None:
        """End the server and everything it started; returns when nothing is left."""
        if self._server is not None:
            self._server.stop()


class _Managed:
    """One replica: its actor and how to start it again."""

    def __init__(self, name: str, index: int, config: TeacherConfig, spec: ServerSpec, log: Path):
        self.name, self.config = name, config
        self.label = name if config.replicas == 1 else f"{name} #{index}"
        self.actor = TeacherActor.options(  # type: ignore[attr-defined]
            # Two calls at a time: `stop` must not wait behind a `start` that takes minutes.
            num_cpus=config.threads,
            num_gpus=config.gpus,
            max_concurrency=2,
        ).remote(spec, log)

    async def start(self) -> Endpoint:
        url, served_name = await self.actor.start.remote(self.config.start_timeout_s)
        return Endpoint(url, served_name)


class TeacherFleet:
    """`TeacherScorer` over every teacher of the configuration."""

    def __init__(
        self,
        config: Config,
        log_dir: Path,
        *,
        host: str,
        needed_tokens: Mapping[str, int],
        tokenized: Sequence[tuple[str, Sequence[int]]],
        top_k: int = 0,
        support: str = "teacher",
    ) -> None:
        """
        Args:
            host: address the servers bind to; loopback unless the run spans a cluster.
            needed_tokens: teacher -> longest prompt plus response that it will be given.
            tokenized: texts with the student's ids of them, to compare a teacher's tokenizer by
                that has no checkpoint on this machine.
            top_k: tokens a position whose logprobs `score` gives besides the sampled one's.
            support: whose top-k: the ``teacher``'s own, or the ``student``'s (each rollout then
                carries it, as `Rollout.topk`).
        """
        assert support in ("teacher", "student"), support
        self._tokenized = tokenized
        self._top_k = top_k if support == "teacher" else 0
        self._from_student = top_k > 0 and support == "student"
        self._config = config
        self._host, self._log_dir = host, log_dir
        self._needed = needed_tokens
        self._managed: dict[str, list[_Managed]] = {}
        self._clients: dict[str, TeacherClient] = {}
        self._restarting: dict[str, asyncio.Lock] = {}
        self._restarts: dict[str, int] = {}

    async def start(self, startup: Startup, extra: Collection[str] = ()) -> None:
        """Start every managed server, find every teacher healthy, and the right model.

        `extra` names teachers beyond those of the domains (a reference policy), each of which may
        be asked about samples of every domain.

        Raises:
            TeacherError: a server does not start or answer, serves another model, or cannot take
                the longest sample; the text names the teacher and quotes the end of its log.
        """
        used = {domain.teacher for domain in self._config.domains.values()}
        longest = max(self._needed.values(), default=0)
        await asyncio.gather(
            *(
                self._start_teacher(
                    name,
                    self._config.teachers[name],
                    startup,
                    needed=longest if name in extra else self._needed[name],
                    scores_topk=name in used,
                )
                for name in used.union(extra)
            )
        )

    async def _start_teacher(
        self, name: str, config: TeacherConfig, startup: Startup, *, needed: int, scores_topk: bool
    ) -> None:
        with startup.waiting(f"teacher {name}"):
            try:
                if config.endpoints:
                    endpoints = [Endpoint(url, config.model) for url in config.endpoints]
                else:
                    self._managed[name] = [
                        _Managed(name, i, config, self._spec(name, config), self._log(name, i))
                        for i in range(config.replicas)
                    ]
                    endpoints = list(
                        await asyncio.gather(*(m.start() for m in self._managed[name]))
                    )
                client = TeacherClient(
                    name,
                    endpoints,
                    timeout_s=config.timeout_s,
                    retries=config.retries,
                    concurrency=config.concurrency,
                )
                self._clients[name] = client
                info = await client.probe(
                    top_k=self._top_k if scores_topk else 0,
                    candidates=self._from_student and scores_topk,
                )
                if config.endpoints:
                    await self._check_tokenizer(name, client, startup)
            except Exception as error:
                raise _for_user(error) from error
        self._restarting[name], self._restarts[name] = asyncio.Lock(), 0
        limit = info.max_model_len
        if limit < needed:
            raise ModelError(
                f"teacher {name}: its server takes {limit} tokens, but the longest prompt plus "
                f"rollout.max_response_tokens needs {needed} (one more than its length, since a "
                "scoring server must generate a token)"
            )

    async def _check_tokenizer(self, name: str, client: TeacherClient, startup: Startup) -> None:
        """Ids of the student must mean the same to a server whose files are not here."""
        for text, own in self._tokenized:
            theirs = await client.tokenize(text)
            if theirs is None:
                startup.note(
                    f"teacher {name}: its server does not say how it tokenizes; whether token ids "
                    "mean the same to it as to the student was not checked"
                )
                return
            if theirs != list(own):
                raise ModelError(
                    f"teacher {name}: its tokenizer is not the student's: {text!r} is "
                    f"{theirs[:12]} there and {list(own)[:12]} here, so that the student's token "
                    "ids would mean other tokens to it"
                )

    def _spec(self, name: str, config: TeacherConfig) -> ServerSpec:
        assert config.model is not None
        return ServerSpec(
            name=name,
            model_path=config.model,
            revision=config.revision,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            kv_cache_gib=config.kv_cache_gib if config.kv_cache_gib > 0 else None,
            threads=config.threads,
            tensor_parallel_size=config.tensor_parallel_size,
            engine_args=dict(config.engine_args),
            host=self._host,
        )

    def _log(self, name: str, index: int) -> Path:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return (self._log_dir / f"teacher-{name}-{index}.log").resolve()

    async def score(
        self, rollouts: Sequence[Rollout], *, teacher: str | None = None
    ) -> Mapping[str, TeacherScore | TeacherFailed]:
        """Each sample by its own domain's teacher, or by the one that is named; a server that
        died is restarted once. A named teacher scores the sampled tokens alone."""
        plain = teacher is not None
        by_teacher: dict[str, list[ScoreItem]] = {}
        for rollout in rollouts:
            name = teacher or self._config.domains[rollout.prompt.domain].teacher
            by_teacher.setdefault(name, []).append(self._item(rollout, plain))
        results = await asyncio.gather(
            *(
                self._score(name, items, 0 if plain else self._top_k)
                for name, items in by_teacher.items()
            )
        )
        outcomes = {key: value for result in results for key, value in result.items()}
        return {r.sample_id: self._told(r, outcomes[r.sample_id], plain) for r in rollouts}

    def _item(self, rollout: Rollout, plain: bool) -> ScoreItem:
        candidates = None
        if self._from_student and not plain:
            assert rollout.topk is not None, f"{rollout.sample_id} came without the student's top-k"
            # An empty slot is asked about as the sampled token, and empty again in the answer.
            ids = np.asarray(rollout.topk.ids, np.int32)
            candidates = np.where(ids < 0, np.asarray(rollout.response_ids)[:, None], ids)
        return ScoreItem(
            rollout.sample_id, rollout.prompt.token_ids, rollout.response_ids, candidates
        )

    def _told(
        self, rollout: Rollout, outcome: Outcome, plain: bool
    ) -> TeacherScore | TeacherFailed:
        if isinstance(outcome, TeacherFailure):
            return TeacherFailed(outcome.cause)
        topk = None
        if outcome.topk_ids is not None:
            ids, logprobs = outcome.topk_ids, outcome.topk_logprobs
            if self._from_student and not plain:
                ids = np.asarray(rollout.topk.ids, np.int32)  # type: ignore[union-attr]
                assert logprobs is not None
                logprobs = np.where(ids < 0, np.float32(0.0), logprobs)
            topk = TopK(ids, logprobs)
        return TeacherScore(tuple(outcome.logprobs.tolist()), topk)

    async def _score(
        self, teacher: str, items: Sequence[ScoreItem], top_k: int
    ) -> dict[str, Outcome]:
        client, before = self._clients[teacher], self._restarts[teacher]
        scores = await client.score_batch(items, top_k=top_k)
        failed = [i for i in items if isinstance(scores[i.sample_id], TeacherFailure)]
        if failed and await self._revive(teacher, before):
            scores |= await client.score_batch(failed, top_k=top_k)
        return scores

    async def _revive(self, name: str, before: int) -> bool:
        """Restart the dead servers of a managed teacher; whether any was restarted since there
        were `before` restarts (by this call, or by another one that failed at the same time)."""
        async with self._restarting[name]:
            for index, managed in enumerate(self._managed.get(name, ())):
                if not await managed.actor.alive.remote():
                    endpoint = await managed.start()
                    await self._clients[name].replace_endpoint(index, endpoint)
                    self._restarts[name] += 1
            return self._restarts[name] > before

    async def answers(
        self, domain: str, requests: Sequence[tuple[str, Prompt]]
    ) -> Sequence[Rollout]:
        """Greedy answers of the domain's teacher to (request id, prompt) pairs."""
        client = self._clients[self._config.domains[domain].teacher]
        try:
            generated = await client.generate(
                [list(prompt.token_ids) for _, prompt in requests],
                max_tokens=self._config.rollout.max_response_tokens,
                temperature=0.0,
            )
        except ServerError as error:
            raise _for_user(error) from error
        return [
            Rollout(
                sample_id=key,
                prompt=prompt,
                response_ids=tuple(answer.token_ids),
                sampler_logprobs=(),
                weight_version=0,
                finish_reason=finish_reason(answer.finish_reason),
            )
            for (key, prompt), answer in zip(requests, generated, strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        """``teacher/NAME/...``: latency, tokens, retries, failures so far, restarts."""
        flat = {f"teacher/{name}/restarts": float(n) for name, n in self._restarts.items()}
        for name, client in self._clients.items():
            flat |= {f"teacher/{name}/{key}": value for key, value in client.metrics().items()}
        return flat

    async def close(self) -> None:
        """End every server and connection; returns when none is left."""
        await asyncio.gather(
            *(client.close() for client in self._clients.values()), return_exceptions=True
        )
        actors = [managed.actor for group in self._managed.values() for managed in group]
        await asyncio.gather(*(a.stop.remote() for a in actors), return_exceptions=True)


def _for_user(error: BaseException) -> BaseException:
    """The teachers package knows nothing of `mopd`: its errors become ours."""
    cause: Any = getattr(error, "cause", None) or error
    return TeacherError(str(cause)) if isinstance(cause, ServerError) else error
