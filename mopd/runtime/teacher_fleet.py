"""The run's teachers: servers under Ray supervision, and each domain's way to its own.

A managed teacher's servers are started by a Ray actor each, which owns the process and takes it
along when the run ends. A teacher given by URLs is only asked. `TeacherKeeper` says what happens
when one of them fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mopd.config.objective_needs import support_of, teacher_top_k
from mopd.config.schema import Config, TeacherConfig
from mopd.config.teachers import answering, members_of
from mopd.errors import ModelError, TeacherError
from mopd.protocols import TeacherFailed
from mopd.runtime.startup import Startup, all_of
from mopd.runtime.teacher_actor import ManagedReplica, api_key_of, client_of, server_spec, wait_of
from mopd.runtime.teacher_changes import TeacherChanges
from mopd.runtime.teacher_keeper import TeacherKeeper
from mopd.runtime.teacher_registry import write_registry
from mopd.types import Prompt, Rollout, TeacherScore, TopK, finish_reason
from mopd_teachers.client import Endpoint, TeacherClient, sample_seed
from mopd_teachers.errors import TeacherError as ServerError
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure

if TYPE_CHECKING:
    from mopd.build import Prepared


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
        self._config = replace(config, teachers=dict(config.teachers))  # some may come and go
        self._host, self._log_dir = host, log_dir
        self._needed = needed_tokens
        self._keepers: dict[str, TeacherKeeper] = {}
        self._starting: list[ManagedReplica] = []
        self._changes = TeacherChanges(
            self._config, log_dir, self._keepers, self._start_late, self._new_replica
        )
        self._note: Callable[[str], None] = lambda text: None
        self._warn: Callable[[str], None] = self._note

    @classmethod
    def of_run(cls, prepared: Prepared, log_dir: Path, host: str) -> TeacherFleet:
        """What `mopd train` asks of its teachers."""
        config = prepared.config
        return cls(
            config,
            log_dir,
            host=host,
            needed_tokens=prepared.teacher_tokens(),
            tokenized=prepared.tokenized(),
            top_k=teacher_top_k(config.objective),
            support=support_of(config.objective),
        )

    async def start(self, startup: Startup, extra: Collection[str] = ()) -> None:
        """Start every managed server, find every teacher healthy, and the right model.

        `extra` names teachers beyond those of the domains (a reference policy), each of which may
        be asked about samples of every domain.

        Raises:
            TeacherError: a server does not start or answer, serves another model, or cannot take
                the longest sample; the text names the teacher and quotes the end of its log.
                One given by URL is waited for as long as one of ours is.
        """
        self._changes.forget_earlier(startup.warn)
        await all_of(self._starts(startup, extra).values())
        self._note, self._warn = startup.note, startup.warn
        self._write_registry()

    async def start_each(
        self, startup: Startup, extra: Collection[str] = ()
    ) -> dict[str, BaseException | None]:
        """As `start`, but one that fails ends nothing: teacher -> what kept it from starting."""
        starts = self._starts(startup, extra)
        done = await asyncio.gather(*starts.values(), return_exceptions=True)
        return dict(zip(starts, done, strict=True))

    def _starts(
        self, startup: Startup, extra: Collection[str]
    ) -> dict[str, Coroutine[Any, Any, None]]:
        config, longest = self._config, max(self._needed.values(), default=0)
        used = {m for d in config.domains.values() for m in members_of(config, d.teacher)}
        others = {m for name in extra for m in members_of(config, name)}
        return {
            name: self._start_teacher(
                name,
                config.teachers[name],
                startup,
                needed=longest if name in others else self._needed[name],
                scores_topk=name in used,
            )
            for name in sorted(used | others)
        }

    def client(self, name: str) -> TeacherClient:
        """Of a teacher that was started."""
        return self._keepers[name].client

    async def _start_teacher(
        self,
        name: str,
        config: TeacherConfig,
        startup: Startup,
        *,
        needed: int,
        scores_topk: bool,
        late: bool = False,
    ) -> None:
        with startup.waiting(f"teacher {name}"):
            try:
                key = api_key_of(config)
                managed: list[ManagedReplica] = []
                if config.endpoints:
                    endpoints = [Endpoint(url, config.model, key) for url in config.endpoints]
                else:
                    spec = server_spec(name, config, host=self._host, api_key=key)
                    for i in range(config.replicas):
                        if late:
                            managed.append(self._new_replica(name, config, i))
                        else:
                            managed.append(ManagedReplica(config, spec, self._log(name, i)))
                            self._starting.append(managed[-1])
                    endpoints = list(await asyncio.gather(*(m.start() for m in managed)))
                client = client_of(name, config, endpoints)
                self._keepers[name] = TeacherKeeper(
                    name, config, client, managed, startup.note, self._hear_requests
                )
                info = await client.probe(
                    top_k=self._top_k if scores_topk else 0,
                    candidates=self._from_student and scores_topk,
                    # Whoever adds one while the run goes on can do so again once it is there.
                    wait_s=0.0 if late else wait_of(config),
                    told=startup.note,
                )
                if config.endpoints:
                    await self._check_tokenizer(name, client, startup)
            except Exception as error:
                raise for_user(error) from error
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
                startup.warn(
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

    def _log(self, name: str, index: int) -> Path:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return (self._log_dir / f"teacher-{name}-{index}.log").resolve()

    async def score(
        self, rollouts: Sequence[Rollout], *, teacher: str | None = None
    ) -> Mapping[str, TeacherScore | TeacherFailed]:
        """Each sample by its own domain's teacher, or by the one that is named, which scores the
        sampled tokens alone. What happens when one fails: see `TeacherKeeper`."""
        if rollouts:
            step = rollouts[0].sample_id.partition(":")[0]
            self._changes.begin_step(step, self._note, self._write_registry)
        plain = teacher is not None
        names = {
            r.sample_id: teacher or self._changes.teacher_of(r.prompt.domain) for r in rollouts
        }
        by_member: dict[str, list[ScoreItem]] = {}
        for rollout in rollouts:
            for member in members_of(self._config, names[rollout.sample_id]):
                by_member.setdefault(member, []).append(self._item(rollout, plain))
        top_k = 0 if plain else self._top_k
        results = await asyncio.gather(
            *(self._keepers[name].score(items, top_k) for name, items in by_member.items())
        )
        outcomes = dict(zip(by_member, results, strict=True))
        return {
            r.sample_id: self._mixed(r, members_of(self._config, names[r.sample_id]), outcomes)
            if self._config.teachers[names[r.sample_id]].mixture
            else self._told(r, outcomes[names[r.sample_id]][r.sample_id], plain)
            for r in rollouts
        }

    @staticmethod
    def _mixed(
        rollout: Rollout,
        weights: Mapping[str, float],
        outcomes: Mapping[str, Mapping[str, Outcome]],
    ) -> TeacherScore | TeacherFailed:
        """sum_i w_i log T_i of each sampled id (see `mopd.config.teachers`); no score where a
        member gives none."""
        total = np.zeros(len(rollout.response_ids))
        for member, weight in weights.items():
            outcome = outcomes[member][rollout.sample_id]
            if isinstance(outcome, TeacherFailure):
                return TeacherFailed(outcome.cause)
            total += weight * outcome.logprobs.astype(np.float64)
        return TeacherScore(tuple(total.tolist()))

    # ---- changes while the run goes on ------------------------------------------------------

    def _hear_requests(self) -> None:
        """While the run waits for a teacher no step begins, and a server may have been asked for
        that ends the waiting. Nor does a step end, at which the registry is written."""
        self._changes.take_up(self._note, self._write_registry)
        self._write_registry()

    def _new_replica(self, name: str, config: TeacherConfig, number: int) -> ManagedReplica:
        """A server beyond those that the run reserved at its start."""
        spec = server_spec(name, config, host=self._host, api_key=api_key_of(config))
        # On one machine all take turns on the cores, and this one takes its turn, too.
        alone = self._config.ray.address is None
        cpus = 0 if alone else config.threads
        replica = ManagedReplica(config, spec, self._log(name, number), cpus=cpus)
        self._starting.append(replica)
        return replica

    async def _start_late(self, name: str, config: TeacherConfig) -> None:
        """One more teacher, that must be able to take the longest sample of any domain."""
        before = len(self._starting)
        startup = Startup(lambda waiting: None, self._note, self._warn)
        needed = max(self._needed.values(), default=0)
        try:
            await self._start_teacher(
                name, config, startup, needed=needed, scores_topk=True, late=True
            )
        except BaseException:
            keeper = self._keepers.pop(name, None)
            ending = [replica.stop() for replica in self._starting[before:]]
            if keeper is not None:
                ending.append(keeper.close())
            await asyncio.gather(*ending, return_exceptions=True)
            raise

    def _write_registry(self) -> None:
        rows = []
        for name, keeper in self._keepers.items():
            rows.append(keeper.row() | {"domains": self._changes.domains_of(name)})
        write_registry(self._log_dir, rows)

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

    async def answers(
        self,
        domain: str,
        requests: Sequence[tuple[str, Prompt]],
        *,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Sequence[Rollout]:
        """Answers of the domain's teacher to (request id, prompt) pairs; greedy at temperature 0.

        seed: each answer's own is made of it and of the request's id, so that a prompt that is
            here twice is answered twice; None: the servers' noise, or none at temperature 0.
        """
        teacher = answering(self._config, self._config.domains[domain].teacher)
        client = self._keepers[teacher].client
        try:
            generated = await client.generate(
                [list(prompt.token_ids) for _, prompt in requests],
                max_tokens=self._config.rollout.max_response_tokens,
                temperature=temperature,
                seeds=None if seed is None else [sample_seed(seed, key) for key, _ in requests],
            )
        except ServerError as error:
            raise for_user(error) from error
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
        """``teacher/NAME/...``: latency, tokens, retries, failures so far, servers up and down,
        restarts, seconds paused. Asked at every step, which is when the registry is written."""
        self._write_registry()
        return {
            f"teacher/{name}/{key}": value
            for name, keeper in self._keepers.items()
            for key, value in keeper.metrics().items()
        }

    async def close(self) -> None:
        """End every server and connection; returns when none is left."""
        await self._changes.close()
        await asyncio.gather(
            *(keeper.close() for keeper in self._keepers.values()),
            *(managed.stop() for managed in self._starting),
            return_exceptions=True,
        )


def for_user(error: BaseException) -> BaseException:
    """The teachers package knows nothing of `mopd`: its errors become ours."""
    cause: Any = getattr(error, "cause", None) or error
    return TeacherError(str(cause)) if isinstance(cause, ServerError) else error
