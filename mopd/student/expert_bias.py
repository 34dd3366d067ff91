"""Expert biases, and what moves them where routers are trained: DeepSeek-V3's load balancer.

    b_e  <-  b_e + rate * sign(mean over e' of n_e' - n_e)        (arXiv 2408.15664, algorithm 1)

n_e: the tokens of one optimizer update that went to expert e. Megatron's own balancer counts the
positions that only pad a row, too, so that the biases would depend on how a step is cut into
forwards; and it moves them with the gradients, before anybody knows whether the update is made. Its
rate is therefore 0, and this stands in its place.

Legend: S positions, B rows, T = S * B tokens in Megatron's order (rows innermost), E experts, L
routers of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mopd.config.schema import StudentConfig
from mopd.errors import ConfigError
from mopd.student.families.base import Family


def check_rate(config: StudentConfig, family: Family) -> None:
    """Raise ConfigError for a rate that would move nothing."""
    rate = 0.0 if config.freeze_routers else config.router_bias_update_rate
    if rate > 0 and not family.transformer_kwargs().get("moe_router_enable_expert_bias"):
        raise ConfigError(
            f"student.router_bias_update_rate is {rate:g}, but {family.where} "
            f"({family.hf.model_type}) has no expert biases; set it to 0."
        )


class ExpertBiases:
    """Those of one rank. Tokens are counted between `set` and `clear`."""

    def __init__(self, model: Any, rate: float, *, recomputed: bool) -> None:
        """
        model: Megatron's, of this rank.
        recomputed: whether whole layers run again in the backward pass; then their first run is
            the one without gradients.
        """
        routers = [
            layer.mlp.router
            for layer in model.decoder.layers
            if getattr(getattr(layer.mlp, "router", None), "expert_bias", None) is not None
        ]
        self._biases: list[Tensor] = [router.expert_bias for router in routers]
        self._counts: list[Tensor] = [torch.zeros_like(bias) for bias in self._biases]
        self._rate, self._recomputed = rate, recomputed
        self._real_T: Tensor | None = None
        for router, count_E in zip(routers, self._counts, strict=True):
            router._apply_expert_bias = self._counter(count_E)

    def _counter(self, count_E: Tensor) -> Callable[..., None]:
        """What Megatron's router calls with the choices of each of its runs."""

        def count(routing_map_TE: Tensor, padding_mask: Tensor | None = None) -> None:
            if self._real_T is None or torch.is_grad_enabled() == self._recomputed:
                return  # no training, or a layer's second run
            with torch.no_grad():
                count_E.add_((routing_map_TE.bool() & self._real_T.unsqueeze(1)).sum(dim=0))

        return count

    def set(
        self, lengths: Sequence[int], row_length: int, packed: bool, device: torch.device
    ) -> None:
        """Which positions of a micro-batch are tokens: the first of each row, or, end to end, of
        the one row.

        lengths: of the sequences in input positions; 0 for a row of padding.
        row_length: S, of which sequence parallelism gives each tensor-parallel rank its part.
        """
        from megatron.core import parallel_state as ps

        of_row = np.array([sum(lengths)] if packed else lengths)
        real_SB = np.arange(row_length)[:, None] < of_row[None]
        part = np.array_split(real_SB, ps.get_tensor_model_parallel_world_size())[
            ps.get_tensor_model_parallel_rank()
        ]
        self._real_T = torch.from_numpy(part.reshape(-1)).to(device)

    def clear(self) -> None:
        self._real_T = None

    def forget(self) -> None:
        """Drop what was counted: the update it was counted for is not made."""
        for count_E in self._counts:
            count_E.zero_()

    def update(self) -> None:
        """Move the biases by what was counted since the last `update` or `forget`. Collective over
        the ranks of a pipeline stage."""
        from megatron.core import parallel_state as ps

        if not self._biases:
            return
        counts_LE = torch.stack(self._counts)
        group = ps.get_tensor_and_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(counts_LE, group=group)
        moves_LE = self._rate * torch.sign(counts_LE.mean(dim=1, keepdim=True) - counts_LE)
        for bias_E, move_E in zip(self._biases, moves_LE, strict=True):
            bias_E.add_(move_E)
        self.forget()
