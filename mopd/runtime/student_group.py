"""The Megatron student as a group of Ray actors, one rank each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from mopd.protocols import Sequences
from mopd.runtime.cluster import LOOPBACK
from mopd.runtime.engine_client import EngineClient
from mopd.runtime.logs import write_output_to
from mopd.runtime.ports import free_port
from mopd.runtime.startup import Startup
from mopd.types import TrainSample


@ray.remote
class StudentActor:
    """One rank. The class it wraps knows nothing of Ray."""

    def address(self, loopback: bool) -> tuple[str, int]:
        """(host, free port) for rank 0 to meet the others at."""
        host = LOOPBACK if loopback else ray.util.get_node_ip_address()
        return host, free_port(host)

    def build(self, log: Path | None, **arguments: Any) -> None:
        """Join the process group and build this rank's shard of the model."""
        write_output_to(log)
        from mopd.student.trainer import StudentRank

        self._rank = StudentRank(**arguments)

    def connect(self, engines: Sequence[Any], transport: str, host: str, port: int) -> None:
        """Every rank, at once; `engines` are the rollout engines' actors."""
        from mopd.rollout.transfer import open_sender

        self._sender = open_sender(
            transport,
            self._rank.publisher(),
            EngineClient(engines),
            rank=self._rank.rank,
            host=host,
            port=port,
            engines=len(engines),
        )

    def send(self) -> dict[str, int]:
        """The weights, into every engine; their fingerprints."""
        self._sender.send_weights()
        return self._rank.publisher().word_sums()

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Every rank makes the same calls in the same order: they hold collectives."""
        return getattr(self._rank, method)(*arguments, **named)


class StudentGroup:
    """`mopd.protocols.Student` over the actors of every rank."""

    def __init__(self, world_size: int, *, threads: int, gpus: float, loopback: bool) -> None:
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if loopback:  # gloo would take the machine's outward address
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        self._loopback = loopback
        self._actors = [
            StudentActor.options(  # type: ignore[attr-defined]
                num_cpus=threads,
                num_gpus=gpus,
                runtime_env={"env_vars": environment},
            ).remote()
            for _ in range(world_size)
        ]

    async def build(
        self, startup: Startup, *, log_dir: Path | None = None, **arguments: Any
    ) -> None:
        """Build every rank; returns when all of them hold their weights.

        log_dir: an absolute folder for what the ranks print; None leaves it to Ray.
        """
        world_size = len(self._actors)
        with startup.waiting(f"student ({world_size} ranks)"):
            host, port = await self._actors[0].address.remote(self._loopback)
            await self._all(
                lambda rank, actor: actor.build.remote(
                    log_dir and log_dir / f"student-rank-{rank}.log",
                    rank=rank,
                    world_size=world_size,
                    master_addr=host,
                    master_port=port,
                    **arguments,
                )
            )

    async def step(self, samples: Sequence[TrainSample], step: int) -> Mapping[str, float]:
        return await self._call("step", list(samples), step)

    async def logprobs(self, sequences: Sequences) -> Sequence[Sequence[float]]:
        return await self._call("logprobs", list(sequences), temperature=1.0)

    async def publish(self, path: Path | None, transport: str) -> Mapping[str, int]:
        if path is None:
            return (await self._all(lambda _, actor: actor.send.remote()))[0]  # type: ignore[no-any-return]
        return await self._call("publish", path, transport)  # type: ignore[no-any-return]

    async def connect(self, engines: Sequence[Any], transport: str) -> None:
        """Before weights can be sent by NCCL or IPC: meet the rollout engines' actors."""
        host, port = await self._actors[0].address.remote(self._loopback)
        meeting = (list(engines), transport, host, port)
        await self._all(lambda _, actor: actor.connect.remote(*meeting))

    async def save(self, directory: Path) -> None:
        await self._call("save", directory)

    async def begin_save(self, directory: Path) -> None:
        await self._call("begin_save", directory)

    async def save_written(self) -> bool:
        return all(await self._all(lambda _, actor: actor.call.remote("save_written")))

    async def finish_save(self) -> float:
        return await self._call("finish_save")  # type: ignore[no-any-return]

    async def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint folder."""
        await self._call("save_hf", directory)

    async def load(self, directory: Path) -> None:
        await self._call("load", directory)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        # A step's samples are sent once to each machine, not once to each rank.
        shared = [ray.put(a) if isinstance(a, list) else a for a in arguments]
        results = await self._all(lambda _, actor: actor.call.remote(method, *shared, **named))
        return results[0]

    async def _all(self, submit: Any) -> list[Any]:
        # gather raises at the first failing rank; the others may hang in a collective and are
        # ended with the run.
        return await asyncio.gather(*(submit(r, actor) for r, actor in enumerate(self._actors)))
