"""The Ray actor that owns one teacher's server process, and how to get a new one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from mopd.config.model_files import hub_cache_folder
from mopd.config.schema import TeacherConfig
from mopd_teachers.client import TeacherClient
from mopd_teachers.errors import TeacherError as ServerError
from mopd_teachers.replica import Endpoint
from mopd_teachers.server import ServerProcess, ServerSpec


def server_spec(name: str, config: TeacherConfig, *, host: str, api_key: str | None) -> ServerSpec:
    """The server of a teacher that is to be started."""
    assert config.model is not None
    return ServerSpec(
        name=name,
        model_path=config.model,
        revision=pinned_revision(config),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        kv_cache_gib=config.kv_cache_gib if config.kv_cache_gib > 0 else None,
        threads=config.threads,
        tensor_parallel_size=config.tensor_parallel_size,
        engine_args=dict(config.engine_args),
        host=host,
        api_key=api_key,
    )


def pinned_revision(config: TeacherConfig) -> str | None:
    """The very commit of a hub model that this machine's cache has for it; None for a folder, or
    for what runs elsewhere.

    A server that is restarted, or added later, then has it, too, whatever was fetched meanwhile.
    """
    if config.model is None or config.endpoints or Path(config.model).is_dir():
        return None
    cached = hub_cache_folder(config.model, config.revision)
    return config.revision if cached is None else cached.name


def client_of(name: str, config: TeacherConfig, endpoints: Sequence[Endpoint]) -> TeacherClient:
    """A client of these servers as the teacher's configuration has it."""
    return TeacherClient(
        name,
        endpoints,
        timeout_s=config.timeout_s,
        retries=config.retries,
        concurrency=config.concurrency,
        hedge_after_s=config.hedge_after_s,
        hedge_quantile=config.hedge_quantile,
        cache_bytes=int(config.cache_mib * 2**20),
    )


def api_key_of(config: TeacherConfig) -> str | None:
    """The bearer token of a teacher's servers, from the environment."""
    return os.environ[config.api_key_env] if config.api_key_env else None


def wait_of(config: TeacherConfig) -> float:
    """Seconds that its servers may still take to load; those of ours have loaded by then."""
    return config.start_timeout_s if config.endpoints else 0.0


@ray.remote
class TeacherActor:
    """Owns one server process; runs where Ray placed it, so that the server has its resources."""

    def __init__(self, spec: ServerSpec, log_path: Path) -> None:
        self._spec, self._log_path = spec, log_path
        self._server: ServerProcess | None = None

    def start(self, timeout_s: float) -> tuple[str, str]:
        """Start the server, ending the one before, and wait until it answers; (URL, name it
        serves the model under)."""
        self.stop()
        self._server = ServerProcess(self._spec, self._log_path)
        self._server.start()
        self._server.wait_healthy(timeout_s)
        return self._server.url, self._server.served_name

    def pid(self) -> int | None:
        """The server's process."""
        return None if self._server is None else self._server.pid

    def alive(self) -> bool:
        """Whether the process is there."""
        return self._server is not None and self._server.alive()

    def stop(self) -> None:
        """End the server and everything it started; returns when nothing is left."""
        if self._server is not None:
            self._server.stop()


def _require_room(name: str, cpus: float, gpus: float) -> None:
    """Ray would wait for ever for what is not there."""
    free = ray.available_resources()
    have = {kind: free.get(kind, 0.0) for kind in ("CPU", "GPU")}
    if have["CPU"] < cpus or have["GPU"] < gpus:
        raise ServerError(
            f"teacher {name!r}: one more server needs {cpus:g} CPUs and {gpus:g} GPUs, and "
            f"{have['CPU']:g} and {have['GPU']:g} are free in Ray; start it elsewhere and give its "
            "URL (--endpoint)"
        )


class ManagedReplica:
    """One server that this run started: its actor and how to start it again."""

    def __init__(
        self, config: TeacherConfig, spec: ServerSpec, log: Path, *, cpus: int | None = None
    ) -> None:
        """`cpus`: for a server beyond what the run reserved at its start, which must find them
        free; others have theirs.

        Raises TeacherError (of mopd_teachers) where that room is not there.
        """
        self._config, self._spec, self._log = config, spec, log
        self._cpus = config.threads if cpus is None else cpus
        if cpus is not None:
            _require_room(spec.name, cpus, config.gpus)
        self._actor: Any = self._new_actor()

    def _new_actor(self) -> Any:
        return TeacherActor.options(  # type: ignore[attr-defined]
            # Two calls at a time: `stop` must not wait behind a `start` that takes minutes.
            num_cpus=self._cpus,
            num_gpus=self._config.gpus,
            max_concurrency=2,
        ).remote(self._spec, self._log)

    async def start(self) -> Endpoint:
        """Start the server, or start it anew; where it is then. TeacherError when it fails."""
        url, served_name = await self._actor.start.remote(self._config.start_timeout_s)
        return Endpoint(url, served_name, self._spec.api_key)

    async def alive(self) -> bool:
        """Whether the process is there; a lost actor (its machine went) is replaced by a new one,
        which has none."""
        if self._actor is None:
            return False
        try:
            return bool(await self._actor.alive.remote())
        except RayError:
            self._actor = self._new_actor()
            return False

    async def pid(self) -> int | None:
        """The server's process, on its machine."""
        return await self._actor.pid.remote()  # type: ignore[no-any-return]

    async def stop(self) -> None:
        """End the server, for good; returns when nothing of it is left. What it had reserved in Ray
        is free again: an actor that nobody knows of ends."""
        actor, self._actor = self._actor, None
        if actor is not None:
            await actor.stop.remote()
