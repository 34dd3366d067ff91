"""What `mopd teachers add|remove` asks of a run, done beside its steps.

A request is taken up when a step begins. It takes effect at the first step that begins after it
was done (a server of the run's own takes its time to load), is told, and is recorded; what is
refused changes nothing. A teacher that was added scores a domain in the place of the configured
one until it is removed. The configured ones stay: they are asked about held-out answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mopd.config.checks import check_config
from mopd.config.model_files import hub_cache_folder
from mopd.config.schema import Config, TeacherConfig
from mopd.config.teachers import members_of
from mopd.config.wording import nearest
from mopd.errors import ConfigError, TeacherError
from mopd.runtime.teacher_actor import ManagedReplica, api_key_of
from mopd.runtime.teacher_keeper import TeacherKeeper
from mopd.runtime.teacher_registry import (
    ENDED,
    record_change,
    take_requests,
    teachers_until_the_end,
)
from mopd_teachers.client import Endpoint

Start = Callable[[str, TeacherConfig], Awaitable[None]]
"""Start (or ask) the servers of one more teacher and put it among the keepers."""
NewReplica = Callable[[str, TeacherConfig, int], ManagedReplica]
"""One more server of a teacher, with its number."""


class TeacherChanges:
    """Takes requests up and carries them out; knows who scores a domain instead of whom."""

    def __init__(
        self,
        config: Config,
        log_dir: Path,
        keepers: MutableMapping[str, TeacherKeeper],
        start: Start,
        new_replica: NewReplica,
    ) -> None:
        """`config` is the fleet's own: teachers that come are added to it."""
        self._config, self._log_dir, self._keepers = config, log_dir, keepers
        self._start, self._new_replica = start, new_replica
        self._step = ""
        self._instead: dict[str, str] = {}
        self._from_next_step: dict[str, str | None] = {}
        self._leaving: list[str] = []
        self._ending: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Of the requests that were taken up last."""
        return self._task

    def teacher_of(self, domain: str) -> str:
        """Who scores this domain's samples now."""
        return self._instead.get(domain) or self._config.domains[domain].teacher

    def domains_of(self, name: str) -> list[str]:
        """The domains that this teacher scores now, by itself or within a mixture."""
        return [
            d for d in self._config.domains if name in members_of(self._config, self.teacher_of(d))
        ]

    def begin_step(self, step: str, told: Callable[[str], None], done: Callable[[], None]) -> None:
        """Once a step: what was done before holds from here on; what was asked since is begun.
        Returns at once. `told` gets every outcome in words; `done` is called after the last."""
        if step == self._step:
            return
        self._step = step
        for domain, name in self._from_next_step.items():
            self._instead.pop(domain, None)
            if name is not None:
                self._instead[domain] = name
        self._from_next_step.clear()
        for name in self._leaving:  # nobody asks it any more
            self._ending.append(asyncio.ensure_future(self._keepers.pop(name).close()))
            del self._config.teachers[name]
        self._leaving.clear()
        self.take_up(told, done)

    def take_up(self, told: Callable[[str], None], done: Callable[[], None]) -> None:
        """Begin what was asked since. A server more serves at once; who scores a domain changes
        with a step alone. Returns at once; while earlier requests are worked on, does nothing."""
        if self._task is not None and not self._task.done():
            return
        requests = list(take_requests(self._log_dir))
        if requests:
            self._task = asyncio.ensure_future(self._carry_out(requests, told, done))

    async def _carry_out(
        self,
        requests: Sequence[Mapping[str, Any]],
        told: Callable[[str], None],
        done: Callable[[], None],
    ) -> None:
        for request in requests:
            try:
                outcome = await self._changed(request)
            except Exception as error:  # the run goes on with the servers that it has
                cause: Any = getattr(error, "cause", None) or error
                outcome = f"refused: {cause}"
            told(f"teachers {request['op']}: {outcome}")
            record_change(self._log_dir, request, outcome)
        done()

    async def _changed(self, request: Mapping[str, Any]) -> str:
        name, url, domain = (request.get(key) for key in ("teacher", "endpoint", "domain"))
        known = name in self._keepers
        if request["op"] not in ("add", "remove") or (not known and domain is None):
            raise TeacherError(f"no such request can be met: {dict(request)}")
        if request["op"] == "add":
            if domain is not None:
                model, settings = request.get("model"), request.get("settings") or {}
                endpoints = [] if url is None else [str(url)]
                teacher = TeacherConfig(model=model, endpoints=endpoints, **settings)
                return await self._new_teacher(str(name), str(domain), teacher)
            return await self._new_server(self._keepers[str(name)], url, request.get("model"))
        if url is None:
            return await self._teacher_gone(str(name))
        await self._keepers[str(name)].remove(str(url))
        return f"{url} is no server of {name} any more"

    async def _new_server(self, keeper: TeacherKeeper, url: str | None, model: str | None) -> str:
        config = keeper.config
        if url is None and config.model is None:
            raise TeacherError(f"teacher {keeper.name} has no checkpoint to start a server from")
        endpoint = None if url is None else Endpoint(url, model, api_key_of(config))

        def start() -> ManagedReplica:
            return self._new_replica(keeper.name, config, len(keeper.managed))

        return f"{await keeper.add(endpoint, start)} serves {keeper.name}, too"

    async def _new_teacher(self, name: str, domain: str, teacher: TeacherConfig) -> str:
        if name in self._config.teachers:
            raise TeacherError(
                f"there is a teacher {name} already: take another name, or leave the domain out to "
                "give it one more server"
            )
        if domain not in self._config.domains:
            raise TeacherError(f"no domain {domain!r}{nearest(domain, self._config.domains)}")
        self._require_possible(name, domain, teacher)
        self._config.teachers[name] = teacher
        try:
            await self._start(name, teacher)
        except BaseException:
            del self._config.teachers[name]
            raise
        self._from_next_step[domain] = name
        return f"{name} scores {domain} from the next step on"

    def _require_possible(self, name: str, domain: str, teacher: TeacherConfig) -> None:
        """ConfigError or ModelError with all that is wrong, as if it had been configured."""
        from mopd.model_folders import require_same_tokenizer  # it imports what loads models

        config = self._config
        if config.rollout.source == "teachers" or config.objective.teacher.signal == "full":
            raise ConfigError(
                "this run's answers or whole distributions come from its teachers' checkpoints, "
                "which were taken at its start: begin another run with the new teacher"
            )
        changed = replace(
            config,
            teachers={**config.teachers, name: teacher},
            domains={**config.domains, domain: replace(config.domains[domain], teacher=name)},
        )
        if problems := check_config(changed):
            raise ConfigError.listing(f"teacher {name} cannot score {domain}", problems)
        if teacher.model is not None:
            folder: Path | None = Path(teacher.model)
            if not Path(teacher.model).is_dir():
                folder = hub_cache_folder(teacher.model)
            if folder is not None:
                require_same_tokenizer(Path(config.student.model), {name: folder})

    async def _teacher_gone(self, name: str) -> str:
        reference = self._config.objective.kl.reference
        configured = {domain.teacher for domain in self._config.domains.values()} | {reference}
        if any(name in members_of(self._config, each) for each in configured if each is not None):
            raise TeacherError(
                f"the configuration names {name}, which is also asked about held-out answers: it "
                "stays; another teacher can score its domain (mopd teachers add --domain)"
            )
        if name in self._leaving:
            raise TeacherError(f"{name} leaves with the next step already")
        self._leaving.append(name)
        for domain in self._config.domains:
            if self._from_next_step.get(domain) == name:  # it never began
                del self._from_next_step[domain]
            if self._instead.get(domain) in self._leaving:
                self._from_next_step.setdefault(domain, None)
        return f"{name} scores nothing from the next step on"

    def forget_earlier(self, told: Callable[[str], None]) -> None:
        """Changes last as long as the run that they were made of, and requests left from before
        this one began were meant for another. `told` hears of teachers that are not there again."""
        for domain, name in teachers_until_the_end(self._log_dir).items():
            told(
                f"{name}, which was added while the run went on, does not score {domain} "
                f"any more, but {self.teacher_of(domain)} as configured: add it again (mopd "
                "teachers add), or put it into the configuration"
            )
            gone = {"op": ENDED, "teacher": name, "domain": domain}
            record_change(self._log_dir, gone, "not added again by the run that goes on")
        for request in take_requests(self._log_dir):
            outcome = "refused: no run was there to carry it out"
            record_change(self._log_dir, request, outcome)

    async def close(self) -> None:
        """Give up what is being done; returns when what was to end has ended."""
        if self._task is not None:
            self._task.cancel()
        going = [self._task] if self._task is not None else []
        await asyncio.gather(*going, *self._ending, return_exceptions=True)
