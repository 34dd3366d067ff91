"""The Megatron model of a Hugging Face config, with its routers frozen."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mopd.config.schema import StudentConfig
from mopd.errors import ConfigError
from mopd.student import cpu_platform
from mopd.student.attention import SelfAttentionCore
from mopd.student.families.base import Family, Slot
from mopd.student.local_ops import rms_norm
from mopd.student.packing import Whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
"""Which activations are computed again in the backward pass instead of being kept."""


class RMSNorm(nn.Module):
    """RMSNorm for the local spec: Megatron's own wrapper refuses sequence parallelism, which MoE
    with tensor parallelism demands. The tag makes Megatron sum the weight's gradient over the
    ranks that each normalised a part of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def use_transformer_engine() -> bool:
    """The one choice between fused GPU layers with grouped expert GEMMs and plain torch ones."""
    return not cpu_platform.on_cpu() and importlib.util.find_spec("transformer_engine") is not None


def _platform_kwargs(fused: bool) -> dict[str, Any]:
    on_cpu = cpu_platform.on_cpu()
    return {
        "use_cpu_initialization": on_cpu,
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "persist_layer_norm": False,
        # Our schedule keeps the logits until the loss has been taken from them.
        "deallocate_pipeline_outputs": False,
    }


def transformer_config(family: Family, config: StudentConfig) -> Any:
    """Megatron's TransformerConfig; raises ConfigError for an unknown dtype."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    if config.dtype not in DTYPES:
        raise ConfigError(
            f"student.dtype is {config.dtype!r}; expected one of {', '.join(DTYPES)}."
        )
    dtype, parallel = DTYPES[config.dtype], config.parallel
    kwargs = family.transformer_kwargs()
    latent = kwargs.get("multi_latent_attention", False)
    with cpu_platform.quiet_build():
        return (MLATransformerConfig if latent else TransformerConfig)(
            **kwargs,
            **_platform_kwargs(use_transformer_engine()),
            **RECOMPUTE[config.recompute],
            activation_func=F.silu,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            attention_softmax_in_fp32=True,
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            sequence_parallel=parallel.tp > 1,
            moe_token_dispatcher_type="alltoall",
            # An expert bias is a buffer, which `expert_bias.ExpertBiases` moves where asked for.
            moe_router_bias_update_rate=0.0,
            # Micro-batches differ in length; stages tell each other the shape.
            variable_seq_lengths=parallel.pp > 1,
        )


def _layer_spec(megatron: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.experts import SequentialMLP

    from mopd.student.local_experts import LocalExperts

    fused = use_transformer_engine()
    spec = get_gpt_decoder_block_spec(
        megatron, use_transformer_engine=fused, normalization="RMSNorm"
    )
    if not fused:
        spec.layer_norm = RMSNorm
        for layer in spec.layer_specs:
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = SelfAttentionCore
            for holder, name in (
                (layer.submodules, "input_layernorm"),
                (layer.submodules, "pre_mlp_layernorm"),
                (attention, "q_layernorm"),
                (attention, "k_layernorm"),
                (attention, "kv_layernorm"),
            ):
                if getattr(holder, name, IdentityOp) is not IdentityOp:
                    setattr(holder, name, RMSNorm)
            experts = getattr(layer.submodules.mlp.submodules, "experts", None)
            if experts is not None and experts.module is SequentialMLP:
                experts.module = LocalExperts
    return spec


def build(family: Family, config: StudentConfig, vocabulary: int) -> Any:
    """This rank's part of the model, with weights still random.

    `vocabulary` is the padded number of rows, a multiple of tp. Process groups must exist.
    """
    from megatron.core import parallel_state as ps

    with cpu_platform.quiet_build():
        from megatron.core.models.gpt.gpt_model import GPTModel
    megatron = transformer_config(family, config)
    with cpu_platform.quiet_build():
        model = GPTModel(
            megatron,
            _layer_spec(megatron),
            vocab_size=vocabulary,
            max_sequence_length=family.max_positions,
            pre_process=ps.is_pipeline_first_stage(),
            post_process=ps.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=family.tied,
            position_embedding_type="rope",
            rotary_base=family.rope_theta,
            parallel_output=True,
            **family.gpt_kwargs(),
        )
    if not cpu_platform.on_cpu():
        model.cuda(torch.cuda.current_device())
    return model


def state(model: Any) -> dict[str, Tensor]:
    """What of this rank belongs into a checkpoint, by Megatron name: the parameters, and the
    routers' expert biases, which Megatron keeps as buffers."""
    biases = {n: b for n, b in model.named_buffers() if n.endswith(".router.expert_bias")}
    return dict(model.named_parameters()) | biases


def slots(model: Any, family: Family) -> dict[str, Slot]:
    """Where each tensor of `state` comes from, by Megatron name."""
    from megatron.core import parallel_state as ps

    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    experts = model.config.num_moe_experts or 0
    first_expert = (
        ps.get_expert_model_parallel_rank() * experts // ps.get_expert_model_parallel_world_size()
    )
    shapes = family.shapes()
    found = {}
    for name, tensor in state(model).items():
        slot = family.slot(name, layers, first_expert)
        if len(slot.hf) == 1 and tuple(tensor.shape) == shapes[slot.hf[0]]:
            # Nothing is cut, whatever the family says: Transformer Engine's layers keep the down
            # projections of latent attention whole, the local ones cut them.
            slot = replace(slot, packing=Whole())
        found[name] = slot
    return found


def mark_experts(model: Any, slots_: dict[str, Slot]) -> None:
    """Tag expert parameters so that gradients are summed and counted over the expert groups.

    Megatron tags them only when ep > 1. With ep 1, tp 2 and etp 1 each tensor-parallel rank holds
    a whole copy of every expert and shows it half of the tokens; untagged, the copies' gradients
    would never be summed and the copies would drift apart.
    """
    for name, parameter in model.named_parameters():
        if slots_[name].expert:
            parameter.allreduce = False
            # No other rank of the expert model-parallel group holds the same values, so the
            # gradient norm must count them on each.
            parameter.tensor_model_parallel = True


def freeze_routers(model: Any) -> None:
    """Take router weights out of training. Call before the DDP wrap, which gives every parameter
    that still requires a gradient a place in the optimizer's buffers."""
    for name, parameter in model.named_parameters():
        if ".router." in name:
            parameter.requires_grad_(False)
