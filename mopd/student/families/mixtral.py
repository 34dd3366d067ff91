"""Mixtral: Llama with routed experts in every layer."""

from __future__ import annotations

from typing import Any

from mopd.student.families.experts import RoutedExperts


class Mixtral(RoutedExperts):
    """`transformers` MixtralForCausalLM."""

    block = "block_sparse_moe."
    projections = ("w1", "w3", "w2")

    def must_be(self) -> dict[str, Any]:
        return super().must_be() | {"sliding_window": None, "router_jitter_noise": 0.0}

    @property
    def num_experts(self) -> int:
        return int(self.hf.num_local_experts)

    @property
    def expert_width(self) -> int:
        return int(self.hf.intermediate_size)

    @property
    def renormalised(self) -> bool:
        return True
