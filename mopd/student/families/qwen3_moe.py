"""Qwen3-MoE: Qwen3 with routed experts in (most of) its layers."""

from __future__ import annotations

from mopd.student.families.experts import RoutedExperts
from mopd.student.families.qwen3 import Qwen3


class Qwen3Moe(RoutedExperts, Qwen3):
    """`transformers` Qwen3MoeForCausalLM."""

    def routed(self, layer: int) -> bool:
        hf = self.hf
        return layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0
