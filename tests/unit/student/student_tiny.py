"""Tiny checkpoints and samples that the student's tests share (unit and integration)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mopd.types import TrainSample

VOCAB, VALID, PAD = 67, 61, 0
"""The head has rows that no tokenizer id has, and an odd size that tp 2 must pad."""


KINDS = ("moe", "mixed", "dense", "tied", "llama", "llama3", "mixtral", "deepseek", "yarn")
"""qwen3 with experts, with one dense layer, dense, tied; llama, and tied with llama3's positions;
mixtral; deepseek_v3 with groups of experts, and with yarn positions and plain queries."""


def hf_config(kind: str, **overrides: Any) -> Any:
    """A Hugging Face config of one of `KINDS`."""
    import transformers

    common: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        tie_word_embeddings=kind in ("tied", "llama3"),
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=PAD,
        initializer_range=0.15,
    )
    experts: dict[str, Any] = dict(
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.5,  # the student must not inherit it
    )
    match kind:
        case "moe" | "mixed":
            dense = [0] if kind == "mixed" else []
            own = experts | dict(decoder_sparse_step=1, mlp_only_layers=dense)
            return transformers.Qwen3MoeConfig(**(common | own | overrides))
        case "dense" | "tied":
            return transformers.Qwen3Config(**(common | overrides))
        case "llama":
            return transformers.LlamaConfig(**(common | overrides))
        case "llama3":
            rope = dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            )
            return transformers.LlamaConfig(**(common | dict(rope_parameters=rope) | overrides))
        case "mixtral":
            own = dict(intermediate_size=32, num_local_experts=8, num_experts_per_tok=2)
            own |= dict(router_aux_loss_coef=0.5)
            return transformers.MixtralConfig(**(common | own | overrides))
        case "deepseek" | "yarn":
            own = dict(
                num_key_value_heads=4,
                n_routed_experts=8,
                num_experts_per_tok=4,
                n_group=4,
                topk_group=2,
                n_shared_experts=2,
                moe_intermediate_size=32,
                first_k_dense_replace=1,
                routed_scaling_factor=1.5,
                q_lora_rank=32,
                kv_lora_rank=24,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=12,
                num_mtp_layers=0,
            )
            del common["head_dim"]
            if kind == "yarn":
                own |= dict(q_lora_rank=None, n_group=1, topk_group=1, first_k_dense_replace=0)
                own["rope_parameters"] = dict(
                    rope_type="yarn",
                    rope_theta=10000.0,
                    factor=4.0,
                    original_max_position_embeddings=32,
                    beta_fast=32.0,
                    beta_slow=1.0,
                    mscale=1.0,
                    mscale_all_dim=0.7,
                )
            return transformers.DeepseekV3Config(**(common | own | overrides))
    raise AssertionError(kind)


def make_checkpoint(folder: Path, kind: str, seed: int = 0, **overrides: Any) -> Path:
    """Random weights, norms and expert biases included, so that every tensor matters."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(kind, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def make_samples(count: int, seed: int = 0, domains: tuple[str, ...] = ("a", "b")) -> list:
    """Samples of many lengths with plausible scores."""
    g = torch.Generator().manual_seed(seed)

    def ints(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, VALID, (n,), generator=g).tolist())

    samples = []
    for i in range(count):
        p, r = 3 + (5 * i + seed) % 6, 1 + (3 * i + seed) % 7
        sampler = -(1.0 + 3.0 * torch.rand(r, generator=g))
        teacher = sampler + 0.8 * torch.randn(r, generator=g)
        samples.append(
            TrainSample(
                f"s{seed}/{i}",
                domains[i % len(domains)],
                ints(p),
                ints(r),
                tuple(sampler.tolist()),
                tuple(teacher.tolist()),
                orm_advantage=float(torch.randn((), generator=g)) * 0.1,
            )
        )
    return samples


def with_routes(samples: list, layers: int, top_k: int, experts: int, seed: int = 0) -> list:
    """The samples with random expert choices for every input token."""
    random = np.random.default_rng(seed)
    out = []
    for sample in samples:
        tokens = len(sample.prompt_ids) + len(sample.response_ids) - 1
        routes = random.random((tokens, layers, experts)).argsort(-1)[..., :top_k]
        out.append(replace(sample, routed_experts=routes.astype(np.uint8)))
    return out
