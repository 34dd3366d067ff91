"""Qwen3-MoE: Qwen3 with routed experts in (most of) its layers."""

from __future__ import annotations

import re
from typing import Any

from mopd.errors import ModelError
from mopd.student.families.base import Slot
from mopd.student.families.qwen3 import Qwen3, gated_shapes
from mopd.student.packing import Along, GateUp, Whole

# Sequential experts (local spec), and Transformer Engine's grouped ones.
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<a>\d+)\.linear_(?P<fc_a>fc[12])\.weight"
    r"|linear_(?P<fc_b>fc[12])\.weight(?P<b>\d+))"
)


class Qwen3Moe(Qwen3):
    """`transformers` Qwen3MoeForCausalLM."""

    def check(self) -> None:
        super().check()
        hf = self.hf
        if hf.num_experts < 1 or not 1 <= hf.num_experts_per_tok <= hf.num_experts:
            raise ModelError(
                f"{self.where}: num_experts {hf.num_experts} with num_experts_per_tok "
                f"{hf.num_experts_per_tok}; expected 1 <= num_experts_per_tok <= num_experts."
            )
        if hf.num_experts_per_tok == 1 and hf.norm_topk_prob:
            # Megatron has no top-1 router whose weight is always 1.
            raise ModelError(
                f"{self.where}: norm_topk_prob with num_experts_per_tok 1 is not implemented."
            )

    def routed(self, layer: int) -> bool:
        """Whether `layer` has experts (else a dense block)."""
        hf = self.hf
        return layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0

    def transformer_kwargs(self) -> dict[str, Any]:
        hf = self.hf
        return super().transformer_kwargs() | {
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_layer_freq": [int(self.routed(i)) for i in range(hf.num_hidden_layers)],
            # softmax over all experts then renormalised over the chosen == softmax over the chosen
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_router_score_function": "softmax",
            # The router's own dtype in transformers: softmax in float32.
            "moe_router_dtype": "fp32",
            # Auxiliary losses are off whatever the checkpoint's router_aux_loss_coef says: the
            # routers are not ours to train (MATH 9).
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_z_loss_coeff": None,
            "moe_router_bias_update_rate": 0.0,
        }

    def mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hf = self.hf
        if not self.routed(layer):
            return super().mlp_shapes(layer)
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (hf.num_experts, hf.hidden_size)}
        for expert in range(hf.num_experts):
            shapes |= gated_shapes(
                f"mlp.experts.{expert}.", hf.hidden_size, hf.moe_intermediate_size
            )
        return shapes

    def layer_slot(self, prefix: str, name: str, first_expert: int) -> Slot:
        if name == "mlp.router.weight":
            return Slot((prefix + "mlp.gate.weight",), Whole())
        match = _EXPERT.fullmatch(name)
        if match is None:
            return super().layer_slot(prefix, name, first_expert)
        local = int(match["a"] if match["a"] is not None else match["b"])
        expert = f"{prefix}mlp.experts.{first_expert + local}."
        if (match["fc_a"] or match["fc_b"]) == "fc1":
            names = (expert + "gate_proj.weight", expert + "up_proj.weight")
            return Slot(names, GateUp(), expert=True)
        return Slot((expert + "down_proj.weight",), Along(1), expert=True)
