"""The experts of a layer that runs without Transformer Engine, as one step of autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mopd.student.local_ops import gated_experts


class LocalExperts(SequentialMLP):
    """Megatron's experts one after the other: same parameters, same numbers.

    Megatron's own forward sends each through modules made for tensor parallelism, some ten steps of
    autograd an expert; those are taken where the experts are cut over ranks.
    """

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> Any:
        """[N, H] tokens in order of their local expert -> ([N, H], None)."""
        config = self.config
        plain = (
            self.tp_group.size() == 1
            and config.gated_linear_unit
            and config.activation_func is F.silu
            and config.activation_func_clamp_value is None
            and not config.glu_linear_offset
            and not config.add_bias_linear
            and not config.moe_apply_probs_on_input
            and permuted_probs.dtype == permuted_local_hidden_states.dtype
        )
        if not plain or torch.is_autocast_enabled("cpu"):
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        weights = [
            weight
            for expert in self.local_experts
            for weight in (expert.linear_fc1.weight, expert.linear_fc2.weight)
        ]
        counts = tokens_per_expert.tolist()
        return gated_experts(permuted_local_hidden_states, permuted_probs, counts, weights), None
