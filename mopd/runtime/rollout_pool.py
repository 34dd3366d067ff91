"""Several vLLM engines as Ray actors, behind one `RolloutSource`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from mopd.config.schema import RolloutConfig
from mopd.errors import WeightSyncError
from mopd.protocols import Sequences
from mopd.rollout.engine_arguments import engine_environment
from mopd.runtime.logs import write_output_to
from mopd.runtime.startup import Startup
from mopd.types import Prompt, Rollout, UpdateProof


def engine_options(config: RolloutConfig) -> dict[str, Any]:
    """Ray's options for the process of one engine."""
    gpu = config.gpus_per_engine > 0
    return {
        "num_cpus": config.threads_per_engine,
        "num_gpus": config.gpus_per_engine,
        "runtime_env": {"env_vars": engine_environment(config.threads_per_engine, gpu=gpu)},
    }


@ray.remote
class RolloutActor:
    """One engine. The class it wraps knows nothing of Ray."""

    def build(self, log: Path | None, **arguments: Any) -> None:
        """Load the model and run one short batch, which compiles what the first batch would."""
        write_output_to(log)
        from mopd.rollout.engine import RolloutEngine

        self._engine = RolloutEngine(**arguments)
        warm = Prompt("warm-up", "", "", (0, 1, 2, 3))
        for temperature in (1.0, 0.0):
            requests = [(f"warm-up/{temperature}/{i}", warm) for i in range(4)]
            list(self._engine.generate(requests, temperature=temperature, max_tokens=4))
        self._engine.logprobs([([0, 1], [2, 3])])

    def generate(
        self,
        requests: Sequence[tuple[str, Prompt]],
        temperature: float,
        max_tokens: int,
        top_k: int,
    ) -> Iterator[list[Rollout]]:
        """Groups of finished rollouts, streamed."""
        yield from self._engine.generate(
            requests, temperature=temperature, max_tokens=max_tokens, top_k=top_k
        )

    def logprobs(self, sequences: Sequences) -> list[list[float]]:
        return self._engine.logprobs(sequences)

    def update_weights(
        self, path: Path | None, version: int, word_sums: Mapping[str, int] | None, probe: Sequences
    ) -> UpdateProof:
        return self._engine.update_weights(path, version, word_sums, probe)

    def transfer(self, method: str, info: dict[str, Any] | None) -> None:
        """For vLLM's weight transfer: see `EngineClient`."""
        self._engine.transfer(method, info)


class RolloutPool:
    """`RolloutSource` and `WeightReceiver` over all engines."""

    def __init__(self, config: RolloutConfig) -> None:
        self._max_tokens = config.max_response_tokens
        self._actors = [
            RolloutActor.options(  # type: ignore[attr-defined]
                **engine_options(config)
            ).remote()
            for _ in range(config.engines)
        ]

    async def build(
        self, startup: Startup, *, log_dir: Path | None = None, **arguments: Any
    ) -> None:
        """Start every engine; returns when all have answered a first batch.

        log_dir: an absolute folder for what the engines print; None leaves it to Ray.
        """
        with startup.waiting(f"rollout engine ({len(self._actors)})"):
            await asyncio.gather(
                *(
                    actor.build.remote(log_dir and log_dir / f"rollout-engine-{i}.log", **arguments)
                    for i, actor in enumerate(self._actors)
                )
            )

    @property
    def actors(self) -> list[Any]:
        """One an engine."""
        return list(self._actors)

    async def generate(
        self, requests: Sequence[tuple[str, Prompt]], *, temperature: float, top_k: int = 0
    ) -> AsyncIterator[Sequence[Rollout]]:
        """Yield groups of finished rollouts from whichever engine has some.

        Requests are dealt out one by one, so that each engine gets its share of every domain; an
        engine that fails raises here (its samples would be missing from their groups).
        """
        shares = [requests[i :: len(self._actors)] for i in range(len(self._actors))]
        queue: asyncio.Queue[Sequence[Rollout] | BaseException | None] = asyncio.Queue()

        async def drain(actor: Any, share: Sequence[tuple[str, Prompt]]) -> None:
            try:
                stream = actor.generate.options(num_returns="streaming").remote(
                    share, temperature, self._max_tokens, top_k
                )
                async for reference in stream:
                    await queue.put(await reference)
                await queue.put(None)
            except BaseException as error:
                await queue.put(error)
                raise

        tasks = [
            asyncio.ensure_future(drain(actor, share))
            for actor, share in zip(self._actors, shares, strict=True)
            if share
        ]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def logprobs(self, sequences: Sequences) -> Sequence[Sequence[Sequence[float]]]:
        shared = ray.put(list(sequences))
        return await asyncio.gather(*(actor.logprobs.remote(shared) for actor in self._actors))

    async def update_weights(
        self,
        path: Path | None,
        version: int,
        word_sums: Mapping[str, int] | None = None,
        probe: Sequences = (),
    ) -> Sequence[UpdateProof]:
        given = (path, version, word_sums, probe)
        outcomes = await asyncio.gather(
            *(actor.update_weights.remote(*given) for actor in self._actors),
            return_exceptions=True,
        )
        failed = [(i, o) for i, o in enumerate(outcomes) if isinstance(o, BaseException)]
        for index, error in failed:
            cause = getattr(error, "cause", error)
            if isinstance(cause, WeightSyncError):
                raise WeightSyncError(f"rollout engine {index}: {cause}") from error
            raise error
        return [outcome for outcome in outcomes if isinstance(outcome, UpdateProof)]
