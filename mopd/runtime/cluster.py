"""Start or join Ray, with the resources that a configuration declares."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from mopd.config.schema import Config
from mopd.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Role:
    """One kind of process: how many there are and what each reserves."""

    name: str
    count: int
    cpus: float
    gpus: float


def roles(config: Config) -> list[Role]:
    """Every process the run places, teachers given by URL excepted (they run elsewhere)."""
    layout = config.student.parallel
    student, rollout = config.student, config.rollout
    return [
        Role(
            "student rank",
            layout.dp * layout.tp * layout.pp,
            student.threads_per_rank,
            student.gpus_per_rank,
        ),
        Role(
            "rollout engine", rollout.engines, rollout.threads_per_engine, rollout.gpus_per_engine
        ),
        *(
            Role(f"teacher {name}", teacher.replicas, teacher.threads, teacher.gpus)
            for name, teacher in config.teachers.items()
            if not teacher.endpoints
        ),
        Role("verifier worker", 1, 1, 0.0),
    ]


@contextmanager
def ray_cluster(config: Config) -> Iterator[str]:
    """Ray for the length of a run; yields the address that its processes bind to: loopback on
    one machine, this node's own in a cluster.

    Without an address Ray starts in this process on loopback, with as many logical CPUs as the
    roles ask for: on one machine they take turns (sampling, scoring and training do not overlap
    much), so sharing the cores is meant. A cluster must really have what is asked of it.

    Raises:
        ConfigError: the cluster cannot be reached, or is smaller than the roles need.
    """
    needed = roles(config)
    cpus = sum(role.count * role.cpus for role in needed)
    gpus = sum(role.count * role.gpus for role in needed)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.ray.address is None:
        ray.init(
            address="local",  # never one that RAY_ADDRESS or an earlier `ray start` names
            num_cpus=config.ray.num_cpus or max(int(cpus + 0.999), os.cpu_count() or 1),
            include_dashboard=False,
            _node_ip_address=LOOPBACK,
            object_store_memory=256 * 2**20 if gpus == 0 else None,
            **quiet,
        )
    else:
        try:
            ray.init(address=config.ray.address, **quiet)
        except ConnectionError as error:
            raise ConfigError(
                f"ray.address: no Ray cluster at {config.ray.address!r} ({error}); start one with "
                "`ray start --head`, or leave ray.address out to run on this machine alone"
            ) from error
    try:
        have = ray.cluster_resources()
        if have.get("GPU", 0) < gpus or have.get("CPU", 0) < cpus:
            wanted = ", ".join(
                f"{r.count} x {r.name} ({r.cpus:g} CPU, {r.gpus:g} GPU)" for r in needed
            )
            raise ConfigError(
                f"the run needs {cpus:g} CPUs and {gpus:g} GPUs ({wanted}); Ray has "
                f"{have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs"
            )
        yield LOOPBACK if config.ray.address is None else ray.util.get_node_ip_address()
    finally:
        ray.shutdown()
