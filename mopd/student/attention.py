"""Attention for Megatron's plain (local) layers, by torch's own fused kernel.

Megatron's local `DotProductAttention` writes out the [B, heads, S, S] scores, knows no packed
sequences and refuses latent attention, whose values are narrower than its keys.

Legend: S positions, B rows, H query heads, G key/value heads, D and E size of a key and a value
head; T tokens of a packed row, n sequences in it, L the longest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def packed_sequences(lengths: Sequence[int], device: torch.device) -> Any:
    """Megatron's description of sequences that lie end to end in one row of sum(lengths) tokens.

    Transformer Engine reads `cu_seqlens`; `SelfAttentionCore` also finds in `mopd_places` where
    each token stands in a padded [n, L], computed once for all layers.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths)
    packed: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    places = [row * longest + i for row, length in enumerate(lengths) for i in range(length)]
    packed.mopd_places = torch.tensor(places, dtype=torch.long, device=device)
    packed.mopd_shape = (len(lengths), longest)
    return packed


class SelfAttentionCore(nn.Module):
    """Causal attention between queries, keys and values; Megatron's `core_attention`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        """Megatron's arguments. `softmax_scale` defaults to 1 / sqrt(D)."""
        super().__init__()
        assert attention_type == "self" and config.context_parallel_size == 1
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout)
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[S, B, H, D], [S, B, G, D], [S, B, G, E] -> [S, B, H * E], or, packed, [T, H, D] and so
        on -> [T, H * E], where no token sees another sequence.

        There is no mask besides causality: rows are padded on the right, and no real token comes
        after a padded one.
        """
        assert attention_mask is None and attention_bias is None
        if packed_seq_params is None:
            # [S, B, H, D] -> [B, H, S, D]
            heads = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            return self._attend(*heads).permute(2, 0, 1, 3).flatten(2)
        places_T = packed_seq_params.mopd_places
        n, longest = packed_seq_params.mopd_shape

        def padded(tokens: Tensor) -> Tensor:
            """[T, H, D] -> [n, H, L, D]. index_copy and index_select, whose gradients are each
            other; indexing with brackets would add up gradients one by one."""
            out = tokens.new_zeros(n * longest, *tokens.shape[1:]).index_copy(0, places_T, tokens)
            return out.view(n, longest, *tokens.shape[1:]).transpose(1, 2)

        out = self._attend(padded(query), padded(key), padded(value))
        return out.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, places_T)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, H, S, D], [B, G, S, D], [B, G, S, E] -> [B, H, S, E]."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
