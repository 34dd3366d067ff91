"""One model after another answers held-out prompts: a vLLM engine in a process of its own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from mopd.config.schema import RolloutConfig
from mopd.protocols import Sequences
from mopd.runtime.rollout_pool import engine_options
from mopd.types import Prompt, Rollout


@dataclass(frozen=True)
class EngineSpec:
    """What an engine needs to know of its model."""

    model: Path
    """A Hugging Face checkpoint folder."""
    dtype: str
    max_model_len: int
    """Longest prompt + response + 1, tokens."""
    valid_vocab: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seed: int


@ray.remote
class AnsweringActor:
    """Wraps one engine; counts the seconds that vLLM itself works."""

    def build(self, spec: EngineSpec, config: RolloutConfig) -> None:
        """Load the model and run one short batch, which compiles what the first batch would."""
        from mopd.rollout.engine import RolloutEngine

        self._engine = RolloutEngine(
            spec.model,
            config,
            dtype=spec.dtype,
            max_model_len=spec.max_model_len,
            valid_vocab=spec.valid_vocab,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            seed=spec.seed,
        )
        warm = Prompt("warm-up", "", "", (0, 1, 2, 3))
        requests = [(f"warm-up/{i}", warm) for i in range(4)]
        list(self._engine.generate(requests, temperature=0.0, max_tokens=4))
        self._busy_s = 0.0

    def generate(
        self, requests: Sequence[tuple[str, Prompt]], temperature: float, max_tokens: int
    ) -> Iterator[list[Rollout]]:
        """Groups of finished rollouts, streamed."""
        groups = self._engine.generate(requests, temperature=temperature, max_tokens=max_tokens)
        while True:
            began = time.perf_counter()
            group = next(groups, None)
            self._busy_s += time.perf_counter() - began
            if group is None:
                return
            yield group

    def logprobs(self, sequences: Sequences) -> list[list[float]]:
        began = time.perf_counter()
        found = self._engine.logprobs(sequences)
        self._busy_s += time.perf_counter() - began
        return found

    def busy_s(self) -> float:
        """Seconds spent in vLLM's own generating and scoring since the start."""
        return self._busy_s


class AnsweringEngine:
    """One started engine; `close` ends its process."""

    def __init__(self, spec: EngineSpec, config: RolloutConfig) -> None:
        self._spec, self._config = spec, config
        self._actor: Any = AnsweringActor.options(  # type: ignore[attr-defined]
            **engine_options(config)
        ).remote()

    async def start(self) -> None:
        """Returns when the model is loaded; raises what loading it raised."""
        await self._actor.build.remote(self._spec, self._config)

    async def generate(
        self, requests: Sequence[tuple[str, Prompt]], *, temperature: float
    ) -> AsyncIterator[Sequence[Rollout]]:
        """Groups of finished answers to (request id, prompt) pairs, in any order."""
        stream = self._actor.generate.options(num_returns="streaming").remote(
            list(requests), temperature, self._config.max_response_tokens
        )
        async for reference in stream:
            yield await reference

    async def logprobs(self, sequences: Sequences) -> list[list[float]]:
        """[R] logprobs at temperature 1 of each (prompt ids, response ids)'s response."""
        return await self._actor.logprobs.remote(list(sequences))

    async def busy_s(self) -> float:
        return await self._actor.busy_s.remote()

    def close(self) -> None:
        """End the process; what it was doing is lost."""
        ray.kill(self._actor)
