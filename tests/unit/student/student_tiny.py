"""Tiny checkpoints and samples that the student's tests share (unit and integration)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mopd.types import TrainSample

VOCAB, VALID, PAD = 67, 61, 0
"""The head has rows that no tokenizer id has, and an odd size that tp 2 must pad."""


def hf_config(kind: str, **overrides: Any) -> Any:
    """A Hugging Face config: kind is 'moe', 'mixed' (one dense layer), 'dense' or 'tied'."""
    from transformers import Qwen3Config, Qwen3MoeConfig

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
        tie_word_embeddings=kind == "tied",
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=PAD,
        initializer_range=0.15,
    )
    if kind in ("moe", "mixed"):
        common |= dict(
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[0] if kind == "mixed" else [],
            router_aux_loss_coef=0.5,  # the student must not inherit it
        )
        return Qwen3MoeConfig(**(common | overrides))
    return Qwen3Config(**(common | overrides))


def make_checkpoint(folder: Path, kind: str, seed: int = 0, **overrides: Any) -> Path:
    """Random weights, norms included, so that every tensor matters in a comparison."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(kind, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
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
