"""What families with routed experts share: the router's settings and the experts' places."""

from __future__ import annotations

import re
from typing import Any

from mopd.student.families.base import Slot
from mopd.student.families.llama import Llama, gated_shapes
from mopd.student.packing import Along, GateUp, Whole

# Sequential experts (local spec), and Transformer Engine's grouped ones.
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<a>\d+)\.linear_(?P<fc_a>fc[12])\.weight"
    r"|linear_(?P<fc_b>fc[12])\.weight(?P<b>\d+))"
)


class RoutedExperts(Llama):
    """Softmax over the experts, the best few of them for each token."""

    block = "mlp."
    """Of the Hugging Face names: the feed-forward block of a routed layer ..."""
    projections = ("gate_proj", "up_proj", "down_proj")
    """... and an expert's gate, up and down projection."""

    def check(self) -> None:
        super().check()
        hf = self.hf
        if self.num_experts < 1 or not 1 <= hf.num_experts_per_tok <= self.num_experts:
            raise self.refusal(
                f"num_experts {self.num_experts} with num_experts_per_tok "
                f"{hf.num_experts_per_tok}; expected 1 <= num_experts_per_tok <= num_experts"
            )
        if hf.num_experts_per_tok == 1 and self.renormalised:
            # Megatron has no top-1 router whose weight is always 1.
            raise self.refusal("norm_topk_prob with num_experts_per_tok 1 is not implemented")

    @property
    def num_experts(self) -> int:
        return int(self.hf.num_experts)

    @property
    def expert_width(self) -> int:
        return int(self.hf.moe_intermediate_size)

    @property
    def renormalised(self) -> bool:
        """Whether the weights of a token's experts add up to 1."""
        return bool(self.hf.norm_topk_prob)

    def routed(self, layer: int) -> bool:
        """Whether `layer` has experts (else a dense block)."""
        return True

    def transformer_kwargs(self) -> dict[str, Any]:
        hf = self.hf
        return super().transformer_kwargs() | {
            "num_moe_experts": self.num_experts,
            "moe_ffn_hidden_size": self.expert_width,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_layer_freq": [int(self.routed(i)) for i in range(hf.num_hidden_layers)],
            # softmax over all experts then renormalised over the chosen == softmax over the chosen
            "moe_router_pre_softmax": not self.renormalised,
            "moe_router_score_function": "softmax",
            # The router's own dtype in transformers: softmax in float32.
            "moe_router_dtype": "fp32",
            # Auxiliary losses are off whatever the checkpoint's router_aux_loss_coef says: the
            # routers are not ours to train (MATH 9).
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_z_loss_coeff": None,
        }

    def mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hf.hidden_size
        if not self.routed(layer):
            return gated_shapes("mlp.", hidden, self.hf.intermediate_size)
        shapes: dict[str, tuple[int, ...]] = {
            f"{self.block}gate.weight": (self.num_experts, hidden)
        }
        for expert in range(self.num_experts):
            shapes |= gated_shapes(
                f"{self.block}experts.{expert}.", hidden, self.expert_width, self.projections
            )
        return shapes

    def layer_slot(self, prefix: str, name: str, first_expert: int) -> Slot:
        if name == "mlp.router.weight":
            return Slot((f"{prefix}{self.block}gate.weight",), Whole())
        match = _EXPERT.fullmatch(name)
        if match is None:
            return super().layer_slot(prefix, name, first_expert)
        local = int(match["a"] if match["a"] is not None else match["b"])
        expert = f"{prefix}{self.block}experts.{first_expert + local}."
        gate, up, down = (f"{expert}{name}.weight" for name in self.projections)
        if (match["fc_a"] or match["fc_b"]) == "fc1":
            return Slot((gate, up), GateUp(), expert=True)
        return Slot((down,), Along(1), expert=True)
