"""Logprobs of few ids of each row, a bounded number of rows at a time. Pure function of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def scored(
    compute_logits: Callable[[Tensor], Tensor],
    hidden_TH: Tensor,
    targets_T: Tensor,
    top_k: int,
    candidates_TK: Tensor | None,
    rows_at_a_time: int,
) -> tuple[Tensor, Tensor]:
    """Ids and natural-log probabilities, [T, 1 + K] each: the target, then the candidates.

    The candidates are the `top_k` likeliest ids, likeliest first, unless they are given.
    log p(v) = (z_v - max z) - log sum exp(z - max z), in float32, over the whole vocabulary.
    """
    ids, values = [], []
    for start in range(0, hidden_TH.shape[0], rows_at_a_time):
        rows = slice(start, start + rows_at_a_time)
        logits_TV = compute_logits(hidden_TH[rows]).float()
        wanted = [targets_T[rows, None]]
        if candidates_TK is not None:
            wanted.append(candidates_TK[rows])
        elif top_k:
            wanted.append(logits_TV.topk(top_k, dim=-1).indices)
        ids_TK = torch.cat(wanted, dim=-1)
        shifted_TV = logits_TV - logits_TV.amax(dim=-1, keepdim=True)
        own_TK = shifted_TV.gather(-1, ids_TK)
        values.append(own_TK - shifted_TV.exp_().sum(dim=-1, keepdim=True).log_())
        ids.append(ids_TK)
    return torch.cat(ids), torch.cat(values)
