"""vLLM's weight-transfer client over the actors of the rollout engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray


class EngineClient:
    """vLLM's `VLLMWeightSyncClient`: what its trainer engines call, from rank 0's process.

    vLLM's own Ray client takes its actors for the replicas of one engine, which count their NCCL
    ranks themselves; these are engines of their own, with one GPU each, so they are told.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [dict(init_info) for _ in self._actors]
        if "rank_offset" in init_info:
            for index, info in enumerate(infos):
                info["rank_offset"] = init_info["rank_offset"] + index
        self._call("init_weight_transfer_engine", infos)

    def start_weight_update(self) -> None:
        self._call("start_weight_update", [None] * len(self._actors))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._call("update_weights", [update_info] * len(self._actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", [None] * len(self._actors))

    def _call(self, method: str, infos: Sequence[Any]) -> None:
        pairs = zip(self._actors, infos, strict=True)
        ray.get([actor.transfer.remote(method, info) for actor, info in pairs])
