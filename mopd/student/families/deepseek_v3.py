"""DeepSeek-V3: latent attention, sigmoid routers with an expert bias, shared experts.

DeepSeek-V3, arXiv 2412.19437: the bias takes part in choosing the experts and not in their
weights, and is moved by a load balancer, not by a gradient. Here it stays as it is.
"""

from __future__ import annotations

from typing import Any

from mopd.student.families.base import Slot
from mopd.student.families.experts import RoutedExperts
from mopd.student.families.llama import gated_shapes
from mopd.student.packing import Along, GateUp, Whole

_YARN = ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")


class DeepseekV3(RoutedExperts):
    """`transformers` DeepseekV3ForCausalLM, without its multi-token-prediction layers."""

    def must_be(self) -> dict[str, Any]:
        return super().must_be() | {
            "norm_topk_prob": True,  # Megatron's sigmoid router always does
            "rope_interleave": True,  # and so does its latent attention
            # transformers gives the latents' norms this epsilon whatever rms_norm_eps says, vLLM
            # and Megatron give them rms_norm_eps.
            "rms_norm_eps": 1e-6,
        }

    def check(self) -> None:
        super().check()
        hf = self.hf
        if hf.num_key_value_heads != hf.num_attention_heads:
            raise self.refusal(
                f"num_key_value_heads is {hf.num_key_value_heads}; only num_attention_heads "
                f"({hf.num_attention_heads}) is implemented"
            )
        if hf.n_shared_experts < 1:
            raise self.refusal("n_shared_experts is 0; only 1 or more is implemented")
        # Groups are judged by their best two experts in transformers and vLLM, by their best
        # top_k / topk_group in Megatron.
        if hf.n_group > 1 and hf.num_experts_per_tok // hf.topk_group != 2:
            raise self.refusal(
                f"num_experts_per_tok {hf.num_experts_per_tok} with topk_group {hf.topk_group} of "
                f"n_group {hf.n_group}; only twice as many experts as groups is implemented"
            )

    def check_rope(self) -> None:
        rope = self.rope
        kind = rope["rope_type"]
        needed = ("rope_theta", *(_YARN if kind == "yarn" else ()))
        missing = [name for name in needed if name not in rope]
        if kind not in ("default", "yarn") or missing:
            raise self.refusal(
                f"rope_parameters is {rope!r}; only the default kind, with rope_theta, and yarn, "
                f"with {', '.join(_YARN)}, is implemented"
            )
        if kind != "yarn":
            return
        # Where a scale is missing transformers takes another formula than Megatron, which knows
        # neither a given factor nor positions between two dimensions.
        for name, fine in (
            ("mscale", rope["mscale"] > 0),
            ("mscale_all_dim", rope["mscale_all_dim"] > 0),
            ("attention_factor", rope.get("attention_factor") is None),
            ("truncate", rope.get("truncate", True) is True),
        ):
            if not fine:
                raise self.refusal(
                    f"rope_parameters has {name} {rope[name]!r}; only scales above 0, no "
                    "attention_factor and truncate true is implemented"
                )

    @property
    def num_experts(self) -> int:
        return int(self.hf.n_routed_experts)

    def routed(self, layer: int) -> bool:
        return layer >= self.hf.first_k_dense_replace

    @property
    def shared_width(self) -> int:
        return int(self.hf.moe_intermediate_size * self.hf.n_shared_experts)

    def transformer_kwargs(self) -> dict[str, Any]:
        hf, rope = self.hf, self.rope
        grouped = hf.n_group > 1
        kwargs = super().transformer_kwargs() | {
            "multi_latent_attention": True,
            "q_lora_rank": hf.q_lora_rank,
            "kv_lora_rank": hf.kv_lora_rank,
            "qk_head_dim": hf.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
            "v_head_dim": hf.v_head_dim,
            "kv_channels": hf.v_head_dim,
            "qk_layernorm": True,  # of the latents
            "rope_type": "rope",
            "rotary_base": self.rope_theta,
            # Only used with yarn, but read for the softmax's scale in any case.
            "rotary_scaling_factor": 1.0,
            "moe_router_pre_softmax": False,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": hf.n_group if grouped else None,
            "moe_router_group_topk": hf.topk_group if grouped else None,
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
            "moe_shared_expert_intermediate_size": self.shared_width,
        }
        if rope["rope_type"] == "yarn":
            kwargs |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": float(rope["factor"]),
                "original_max_position_embeddings": rope["original_max_position_embeddings"],
                "beta_fast": float(rope.get("beta_fast") or 32),
                "beta_slow": float(rope.get("beta_slow") or 1),
                "mscale": float(rope["mscale"]),
                "mscale_all_dim": float(rope["mscale_all_dim"]),
            }
        return kwargs

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        hf = self.hf
        hidden, heads = hf.hidden_size, hf.num_attention_heads
        queries = heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim)
        shapes: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa.weight": (hf.kv_lora_rank + hf.qk_rope_head_dim, hidden),
            "kv_a_layernorm.weight": (hf.kv_lora_rank,),
            "kv_b_proj.weight": (heads * (hf.qk_nope_head_dim + hf.v_head_dim), hf.kv_lora_rank),
            "o_proj.weight": (hidden, heads * hf.v_head_dim),
        }
        if hf.q_lora_rank is None:
            shapes["q_proj.weight"] = (queries, hidden)
        else:
            shapes |= {
                "q_a_proj.weight": (hf.q_lora_rank, hidden),
                "q_a_layernorm.weight": (hf.q_lora_rank,),
                "q_b_proj.weight": (queries, hf.q_lora_rank),
            }
        return {f"self_attn.{name}": shape for name, shape in shapes.items()}

    def mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        shapes = super().mlp_shapes(layer)
        if self.routed(layer):
            shapes["mlp.gate.e_score_correction_bias"] = (self.num_experts,)
            shapes |= gated_shapes("mlp.shared_experts.", self.hf.hidden_size, self.shared_width)
        return shapes

    def layer_slot(self, prefix: str, name: str, first_expert: int) -> Slot:
        shared = prefix + "mlp.shared_experts."
        match name:
            case "mlp.router.expert_bias":
                return Slot((prefix + "mlp.gate.e_score_correction_bias",), Whole())
            case "mlp.shared_experts.linear_fc1.weight":
                return Slot((shared + "gate_proj.weight", shared + "up_proj.weight"), GateUp())
            case "mlp.shared_experts.linear_fc2.weight":
                return Slot((shared + "down_proj.weight",), Along(1))
        return super().layer_slot(prefix, name, first_expert)

    def attention_slot(self, prefix: str, name: str) -> Slot:
        match name.removeprefix("self_attention."):
            case "linear_q_proj.weight":
                return Slot((prefix + "q_proj.weight",), Along(0))
            case "linear_q_down_proj.weight":
                return Slot((prefix + "q_a_proj.weight",), Along(0))
            case "q_layernorm.weight" | "linear_q_up_proj.layer_norm_weight":
                return Slot((prefix + "q_a_layernorm.weight",), Whole())
            case "linear_q_up_proj.weight":
                return Slot((prefix + "q_b_proj.weight",), Along(0))
            case "linear_kv_down_proj.weight":
                return Slot((prefix + "kv_a_proj_with_mqa.weight",), Along(0))
            case "kv_layernorm.weight" | "linear_kv_up_proj.layer_norm_weight":
                return Slot((prefix + "kv_a_layernorm.weight",), Whole())
            case "linear_kv_up_proj.weight":
                return Slot((prefix + "kv_b_proj.weight",), Along(0))
            case "linear_proj.weight":
                return Slot((prefix + "o_proj.weight",), Along(1))
        raise AssertionError(f"Megatron parameter {name} is not known")
