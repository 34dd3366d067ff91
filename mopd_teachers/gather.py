"""Logprobs of few ids of each row, a bounded number of rows at a time. Pure functions of tensors.

Legend: T rows, H hidden size, V vocabulary, K candidates a row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_GROUPED_FROM = 4096
"""Vocabularies from which on narrowing them first takes less time than it costs."""


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

    On the CPU, where torch's selection takes many times longer: of equal logprobs the lower id
    comes first (torch leaves it open), and a large vocabulary is first narrowed to the k groups
    of neighbouring ids whose best are the best.
    """
    if logprobs_TV.device.type != "cpu":
        top = logprobs_TV.topk(k, dim=-1)
        return top.values, top.indices
    rows, vocabulary = logprobs_TV.shape
    size = int((vocabulary / k) ** 0.5)  # of a group: about as many groups as ids in k of them
    if vocabulary < _GROUPED_FROM or 4 * k * size > vocabulary:
        bits_TK, ids_TK = _smallest(_bits(logprobs_TV), k)
    else:
        count = vocabulary // size
        groups = logprobs_TV[:, : count * size].unflatten(-1, (count, size))
        _, best_TK = _smallest(_bits(groups.amax(-1)), k)
        best_TK.sort(-1)  # so that ids stay in order
        inside = (best_TK[:, :, None] * size + np.arange(size)).reshape(rows, k * size)
        left = np.arange(count * size, vocabulary)
        left = np.broadcast_to(left, (rows, len(left)))
        ids_TC = np.concatenate((inside, left), -1)
        bits_TK, places_TK = _smallest(_bits(logprobs_TV.gather(-1, torch.from_numpy(ids_TC))), k)
        ids_TK = np.take_along_axis(ids_TC, places_TK, -1)
    return torch.from_numpy(-bits_TK.view(np.float32)), torch.from_numpy(ids_TK)


def _bits(logprobs: Tensor) -> np.ndarray:
    """int32 in the order of -log p: a logprob is at most 0, and the bits of floats of one sign are
    in the order of their size. numpy selects among them with vector instructions."""
    return logprobs.abs().numpy().view(np.int32)


def _smallest(bits_TC: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The `k` smallest of each row and their columns, [T, k] each, the smallest first; of equal
    ones those of lower columns."""
    rows, columns = bits_TC.shape
    largest_T1 = np.partition(bits_TC, k - 1, axis=-1)[:, k - 1 : k]
    among_TC = bits_TC <= largest_T1
    tied = np.flatnonzero(np.count_nonzero(among_TC, axis=-1) != k)
    among_TC[tied] = np.arange(columns) < k  # as many as in other rows; put right below
    columns_TK = (np.flatnonzero(among_TC) % columns).reshape(rows, k)
    if tied.size:
        keys = np.partition(_keys(bits_TC[tied], np.arange(columns)), k - 1, axis=-1)[:, :k]
        columns_TK[tied] = keys & 0xFFFFFFFF
    keys_TK = _keys(np.take_along_axis(bits_TC, columns_TK, -1), columns_TK)
    keys_TK.sort(-1)
    return (keys_TK >> 32).astype(np.int32), keys_TK & 0xFFFFFFFF


def _keys(bits: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """int64, each another number, in the order of bits and then of columns."""
    return (bits.astype(np.int64) << 32) | columns
