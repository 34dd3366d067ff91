"""A run's Ray on one machine: nobody else reaches any port of it."""

from __future__ import annotations

import psutil

from mopd.config.schema import Config, DomainConfig, TeacherConfig


def test_ray_listens_on_loopback_alone() -> None:
    import ray

    from mopd.runtime.cluster import LOOPBACK, ray_cluster

    config = Config(
        teachers={"t": TeacherConfig(endpoints=["http://127.0.0.1:1"])},
        domains={"d": DomainConfig(teacher="t")},
    )

    @ray.remote(num_cpus=0)
    class Worker:
        def address(self) -> str:
            return str(ray.util.get_node_ip_address())

    with ray_cluster(config) as host:
        assert host == LOOPBACK
        assert ray.get(Worker.remote().address.remote()) == LOOPBACK  # type: ignore[attr-defined]
        own = psutil.Process()
        family = [own, *own.children(recursive=True)]
        seen = {}
        for process in family:
            try:
                found = process.net_connections("inet")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            seen[f"{process.name()} {process.pid}"] = {
                c.laddr.ip.removeprefix("::ffff:")  # IPv4 as IPv6 writes it
                for c in found
                if c.status == psutil.CONN_LISTEN
            }
        assert len(family) >= 5
        open_to_others = {who: ips - {LOOPBACK, "::1"} for who, ips in seen.items()}
        assert not {who: ips for who, ips in open_to_others.items() if ips}
