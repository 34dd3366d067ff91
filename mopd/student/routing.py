"""Rollout routing replay (R3): in training, each token goes to the experts the rollout sent it to.

The rollout engine and the trainer compute the same router with different kernels; where two experts
are nearly level they choose differently, and the token's logprob jumps. With the engine's own
choices the trainer's router only weighs them: its gradient, where it is trained, flows through
those weights. (Rollout routing replay, arXiv 2510.11370; the shared MATH notes, section 9.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mopd.types import TrainSample


class RoutingReplay:
    """The routers of one rank. Off until `set` is called; `clear` turns it off again."""

    def __init__(self, model: Any) -> None:
        """Megatron's model of this rank; every router asks here which experts to take."""
        self._routers = [
            _Router(layer.layer_number - 1, layer.mlp.router)
            for layer in model.decoder.layers
            if hasattr(layer.mlp, "router")
        ]
        self._top_k = model.config.moe_router_topk

    def set(
        self,
        samples: Sequence[TrainSample | None],
        row_length: int,
        packed: bool,
        device: torch.device,
    ) -> None:
        """Take the choices of one micro-batch's samples, one a row, or end to end in one row.

        row_length: S, of which sequence parallelism gives each tensor-parallel rank its part.
        Padding keeps the router's own choice.
        """
        from megatron.core import parallel_state as ps

        rows = 1 if packed else len(samples)
        layers = [router.layer for router in self._routers]
        # Megatron's routers see tokens position by position, rows innermost.
        routes = np.full((row_length, rows, len(layers), self._top_k), -1, dtype=np.int32)
        start = 0
        for row, sample in enumerate(samples):
            if sample is None:
                continue
            assert sample.routed_experts is not None, "refusals were not asked"
            own = sample.routed_experts[:, layers]
            if packed:
                routes[start : start + len(own), 0] = own
                start += len(own)
            else:
                routes[: len(own), row] = own
        part = np.array_split(routes, ps.get_tensor_model_parallel_world_size())[
            ps.get_tensor_model_parallel_rank()
        ]
        routes_SBLK = torch.from_numpy(part).to(device).long()
        for place, router in enumerate(self._routers):
            router.wanted_TK = routes_SBLK[:, :, place].reshape(-1, self._top_k)

    def clear(self) -> None:
        for router in self._routers:
            router.wanted_TK = None


class _Router:
    """Stands where Megatron's router keeps its `router_replay`."""

    def __init__(self, layer: int, router: Any) -> None:
        self.layer = layer
        self.wanted_TK: Tensor | None = None
        """[tokens, k] experts to take; -1 for the router's own choice."""
        router.router_replay = self

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Megatron's hook: (scores, ids) of the chosen experts, each [tokens, k]."""
        scores_TK, own_TK = default(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        wanted_TK = self.wanted_TK
        if wanted_TK is None:
            return scores_TK, own_TK
        assert wanted_TK.shape == own_TK.shape, (wanted_TK.shape, own_TK.shape)
        chosen_TK = torch.where(wanted_TK >= 0, wanted_TK, own_TK)
        return scores_TE.gather(1, chosen_TK), chosen_TK


def refusal(sample: TrainSample, layers: int, top_k: int, experts: int) -> str | None:
    """Why a sample's recorded choices cannot be replayed, or None."""
    routes = sample.routed_experts
    if routes is None:
        return "no expert choices came with the rollout (student.routing_replay)"
    expected = (len(sample.prompt_ids) + len(sample.response_ids) - 1, layers, top_k)
    if routes.shape != expected:
        return f"expert choices of shape {list(routes.shape)}, expected {list(expected)}"
    if routes.dtype.kind not in "iu":
        return f"expert choices of type {routes.dtype}, expected whole numbers"
    for chosen in (routes.min(), routes.max()) if routes.size else ():
        if not 0 <= chosen < experts:
            return f"expert {chosen} was chosen of {experts}"
    return None
