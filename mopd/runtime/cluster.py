"""Start or join Ray, with the resources that a configuration declares."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from mopd.config.placement import placement_text, total_reserved
from mopd.config.schema import Config
from mopd.errors import ConfigError

LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0


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
    cpus, gpus = total_reserved(config)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.ray.address is None:
        with _loopback_alone():
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
            _require_somebody(config.ray.address)
            ray.init(address=config.ray.address, **quiet)
        except OSError as error:
            raise ConfigError(
                f"ray.address: no Ray cluster at {config.ray.address!r} ({error}); start one with "
                "`ray start --head`, or leave ray.address out to run on this machine alone"
            ) from error
    try:
        have = ray.cluster_resources()
        if have.get("GPU", 0) < gpus or have.get("CPU", 0) < cpus:
            raise ConfigError(
                f"the run needs {cpus:g} CPUs and {gpus:g} GPUs ({placement_text(config)}); "
                f"Ray has {have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs"
            )
        yield LOOPBACK if config.ray.address is None else ray.util.get_node_ip_address()
    finally:
        ray.shutdown()


def _require_somebody(address: str) -> None:
    """Raises OSError where nothing listens at HOST:PORT; Ray goes on trying for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


@contextmanager
def _loopback_alone() -> Iterator[None]:
    """Let Ray listen on loopback.

    `_node_ip_address` alone does not: Ray takes 127.0.0.1 for a mistake and puts the machine's own
    address in its place, with every port open to the network. It does not where it is told that
    no cluster is meant, by a switch that is named after the systems on which that is its default.
    """
    from ray._private import ray_constants

    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, switch = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name] = "0"  # for the processes that Ray starts
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = switch
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
