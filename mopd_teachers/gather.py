"""Logprobs of few ids of each row, a bounded number of rows at a time. Pure functions of tensors.

Legend: T rows, H hidden size, V vocabulary, K candidates a row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
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
    """Ids (int64) and natural-log probabilities (float32), [T, 1 + K] each: the target, then the
    candidates.

    The candidates are the `top_k` likeliest ids, likeliest first, unless they are given.
    log p(v) = z_v - log sum exp z, over the whole vocabulary, in float32 whatever the model's
    type.
    """
    width = 1 + (top_k if candidates_TK is None else candidates_TK.shape[1])
    # Made before the blocks: small results that stay, allocated between large blocks that go, keep
    # the C library from using the blocks' memory again, and the process grows with every block.
    ids_TK = targets_T.new_empty((len(targets_T), width))
    values_TK = torch.empty(ids_TK.shape, dtype=torch.float32, device=hidden_TH.device)
    ids_TK[:, 0] = targets_T
    if candidates_TK is not None:
        ids_TK[:, 1:] = candidates_TK
    asked = width if candidates_TK is not None else 1  # ids that are known beforehand
    for start in range(0, hidden_TH.shape[0], rows_at_a_time):
        rows = slice(start, start + rows_at_a_time)
        logprobs_TV = compute_logits(hidden_TH[rows]).log_softmax(-1, dtype=torch.float32)
        values_TK[rows, :asked] = logprobs_TV.gather(-1, ids_TK[rows, :asked])
        if top_k and candidates_TK is None:
            values_TK[rows, 1:], ids_TK[rows, 1:] = likeliest(logprobs_TV, top_k)
        del logprobs_TV  # before the next block is made, not after
    return ids_TK, values_TK


def likeliest(logprobs_TV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of each row and their ids, [T, k] each, the largest first.

    On the CPU numpy's vectorised selection takes half the time of torch's; there, of equal
    logprobs the lower id comes first (torch leaves it open).
    """
    if logprobs_TV.device.type != "cpu":
        top = logprobs_TV.topk(k, dim=-1)
        return top.values, top.indices
    # A logprob is at most 0, and the bits of floats of one sign are in the order of their size:
    # the k smallest of (bits of -log p, id) are the k likeliest, each with its id.
    keys_TV = logprobs_TV.abs().numpy().view(np.int32).astype(np.int64)
    keys_TV <<= 32
    keys_TV |= np.arange(keys_TV.shape[1])
    if k < keys_TV.shape[1]:
        keys_TV = np.partition(keys_TV, k - 1, axis=-1)[:, :k]
    keys_TK = np.sort(keys_TV, axis=-1)
    values_TK = -(keys_TK >> 32).astype(np.int32).view(np.float32)
    return torch.from_numpy(values_TK), torch.from_numpy(keys_TK & 0xFFFFFFFF)
