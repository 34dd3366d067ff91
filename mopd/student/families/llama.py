"""Llama, dense: grouped-query attention, gated SiLU, RMSNorm, rotary positions.

Also Mistral-like and SmolLM2 checkpoints, which say ``model_type: llama``. The other families are
written as differences from this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mopd.student.families.base import Family, Slot
from mopd.student.packing import Along, GateUp, GroupedQKV, Whole

_LLAMA3_ROPE = {
    # What Megatron's `rope_scaling` has built in.
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Llama(Family):
    """`transformers` LlamaForCausalLM."""

    qk_norm = False
    """Whether queries and keys are normalised per head."""

    def check(self) -> None:
        super().check()
        partial = self.rope.get("partial_rotary_factor", 1.0)
        if partial != 1.0:  # transformers' models of these families pass over it, vLLM's do not
            raise self.refusal(f"partial_rotary_factor is {partial!r}; only 1.0 is implemented")
        self.check_rope()

    def check_rope(self) -> None:
        """Raise ModelError for rotary positions that would be computed otherwise here."""
        rope = self.rope
        if "rope_theta" not in rope or rope["rope_type"] not in ("default", "llama3"):
            raise self.refusal(
                f"rope_parameters is {rope!r}; only the default and the llama3 kind, with "
                "rope_theta, is implemented"
            )
        if rope["rope_type"] == "llama3":
            for name, expected in _LLAMA3_ROPE.items():
                if rope.get(name) != expected:
                    raise self.refusal(
                        f"rope_parameters has {name} {rope.get(name)!r}; only {expected!r} is "
                        "implemented"
                    )

    def must_be(self) -> dict[str, Any]:
        return {
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
        }

    @property
    def head_size(self) -> int:
        hf = self.hf
        return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads

    def transformer_kwargs(self) -> dict[str, Any]:
        hf = self.hf
        return {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "ffn_hidden_size": hf.intermediate_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": self.head_size,
            "layernorm_epsilon": hf.rms_norm_eps,
            "normalization": "RMSNorm",
            "qk_layernorm": self.qk_norm,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
        }

    def gpt_kwargs(self) -> dict[str, Any]:
        if self.rope["rope_type"] == "default":
            return {}
        return {"rope_scaling": True, "rope_scaling_factor": float(self.rope["factor"])}

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hf.hidden_size
        return {
            **self.attention_shapes(),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            **self.mlp_shapes(layer),
        }

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        hf, size = self.hf, self.head_size
        hidden = hf.hidden_size
        queries, keys = hf.num_attention_heads * size, hf.num_key_value_heads * size
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
        }
        if self.qk_norm:
            shapes |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
        return shapes

    def mlp_shapes(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        return gated_shapes("mlp.", self.hf.hidden_size, self.hf.intermediate_size)

    def layer_slot(self, prefix: str, name: str, first_expert: int) -> Slot:
        match name:
            case "input_layernorm.weight" | "self_attention.linear_qkv.layer_norm_weight":
                return Slot((prefix + "input_layernorm.weight",), Whole())
            case "pre_mlp_layernorm.weight" | "mlp.linear_fc1.layer_norm_weight":
                return Slot((prefix + "post_attention_layernorm.weight",), Whole())
            case "mlp.linear_fc1.weight":
                names = (prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight")
                return Slot(names, GateUp())
            case "mlp.linear_fc2.weight":
                return Slot((prefix + "mlp.down_proj.weight",), Along(1))
        return self.attention_slot(prefix + "self_attn.", name)

    def attention_slot(self, prefix: str, name: str) -> Slot:
        """`name` within a layer's attention; `prefix` is ``model.layers.N.self_attn.``."""
        hf = self.hf
        match name:
            case "self_attention.linear_qkv.weight":
                per_group = hf.num_attention_heads // hf.num_key_value_heads
                return Slot(
                    tuple(f"{prefix}{p}_proj.weight" for p in "qkv"),
                    GroupedQKV(hf.num_key_value_heads, per_group, self.head_size),
                )
            case "self_attention.linear_proj.weight":
                return Slot((prefix + "o_proj.weight",), Along(1))
            case "self_attention.q_layernorm.weight":
                return Slot((prefix + "q_norm.weight",), Whole())
            case "self_attention.k_layernorm.weight":
                return Slot((prefix + "k_norm.weight",), Whole())
        raise AssertionError(f"Megatron parameter {name} is not known")


def gated_shapes(
    prefix: str,
    hidden: int,
    width: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, tuple[int, ...]]:
    """Shapes of one gated feed-forward block; `names` of its gate, up and down projection."""
    gate, up, down = names
    return {
        f"{prefix}{gate}.weight": (width, hidden),
        f"{prefix}{up}.weight": (width, hidden),
        f"{prefix}{down}.weight": (hidden, width),
    }
