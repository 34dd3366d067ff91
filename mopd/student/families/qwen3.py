"""Qwen3, dense: grouped-query attention with q/k norms, gated SiLU, RMSNorm, rotary positions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mopd.errors import ModelError
from mopd.student.families.base import Family, Slot
from mopd.student.packing import Along, GateUp, GroupedQKV, VocabularyRows, Whole

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class Qwen3(Family):
    """`transformers` Qwen3ForCausalLM."""

    def check(self) -> None:
        hf = self.hf
        for name, expected in self.must_be().items():
            got = getattr(hf, name, expected)
            if got != expected:
                raise ModelError(
                    f"{self.where}: {name} is {got!r}; only {expected!r} is implemented for "
                    f"{hf.model_type}. Choose another checkpoint for student.model."
                )
        rope = getattr(hf, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") != "default" or "rope_theta" not in rope:
            raise ModelError(
                f"{self.where}: rope_parameters {rope!r}; only the default kind, with rope_theta, "
                "is implemented. Choose a checkpoint without context extension."
            )

    def must_be(self) -> dict[str, Any]:
        """Settings of the Hugging Face config with one implemented value."""
        return {
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
        }

    def transformer_kwargs(self) -> dict[str, Any]:
        hf = self.hf
        return {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "ffn_hidden_size": hf.intermediate_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": hf.head_dim,
            "layernorm_epsilon": hf.rms_norm_eps,
            "normalization": "RMSNorm",
            "qk_layernorm": True,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        hf = self.hf
        hidden = hf.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (hf.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (hf.vocab_size, hidden)
        queries = hf.num_attention_heads * hf.head_dim
        keys = hf.num_key_value_heads * hf.head_dim
        for layer in range(hf.num_hidden_layers):
            own = {
                "self_attn.q_proj.weight": (queries, hidden),
                "self_attn.k_proj.weight": (keys, hidden),
                "self_attn.v_proj.weight": (keys, hidden),
                "self_attn.o_proj.weight": (hidden, queries),
                "self_attn.q_norm.weight": (hf.head_dim,),
                "self_attn.k_norm.weight": (hf.head_dim,),
                "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,),
                **self.mlp_shapes(layer),
            }
            shapes.update({f"model.layers.{layer}.{name}": s for name, s in own.items()})
        return shapes

    def mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        return gated_shapes("mlp.", self.hf.hidden_size, self.hf.intermediate_size)

    def slot(self, name: str, layers: Sequence[int], first_expert: int) -> Slot:
        rows = VocabularyRows(self.vocabulary)
        if name == "embedding.word_embeddings.weight":
            return Slot(("model.embed_tokens.weight",), rows)
        if name == "output_layer.weight":
            # With tied weights the last pipeline stage keeps a copy of the embedding here.
            return Slot(("model.embed_tokens.weight" if self.tied else "lm_head.weight",), rows)
        if name == "decoder.final_layernorm.weight":
            return Slot(("model.norm.weight",), Whole())
        match = _LAYER.fullmatch(name)
        assert match, f"Megatron parameter {name} is not known"
        prefix = f"model.layers.{layers[int(match[1])]}."
        return self.layer_slot(prefix, match[2], first_expert)

    def layer_slot(self, prefix: str, name: str, first_expert: int) -> Slot:
        """`name` within a layer; each norm has a second name where TE fuses it into a linear."""
        hf = self.hf
        attention = prefix + "self_attn."
        match name:
            case "self_attention.linear_qkv.weight":
                per_group = hf.num_attention_heads // hf.num_key_value_heads
                return Slot(
                    tuple(f"{attention}{p}_proj.weight" for p in "qkv"),
                    GroupedQKV(hf.num_key_value_heads, per_group, hf.head_dim),
                )
            case "self_attention.linear_proj.weight":
                return Slot((attention + "o_proj.weight",), Along(1))
            case "self_attention.q_layernorm.weight":
                return Slot((attention + "q_norm.weight",), Whole())
            case "self_attention.k_layernorm.weight":
                return Slot((attention + "k_norm.weight",), Whole())
            case "input_layernorm.weight" | "self_attention.linear_qkv.layer_norm_weight":
                return Slot((prefix + "input_layernorm.weight",), Whole())
            case "pre_mlp_layernorm.weight" | "mlp.linear_fc1.layer_norm_weight":
                return Slot((prefix + "post_attention_layernorm.weight",), Whole())
            case "mlp.linear_fc1.weight":
                names = (prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight")
                return Slot(names, GateUp())
            case "mlp.linear_fc2.weight":
                return Slot((prefix + "mlp.down_proj.weight",), Along(1))
        raise AssertionError(f"Megatron parameter {name} is not known")


def gated_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one gated feed-forward block."""
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }
