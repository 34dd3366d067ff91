"""What one rank knows of each row's softmax from its own vocabulary columns.

Every backend makes `Partials`; `vocab_parallel.combine` turns them into `RowStats` over the whole
vocabulary; every backend's backward reads `RowStats`. Values are of the raw logits: the
temperature T is inside the exponent, exp((x - max) / T), which keeps the subtraction exact.

Shapes: N rows. Dtype: float32, or float64 where the logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a logits shard are real, and which token ids they stand for."""

    start: int
    """Token id of the shard's column 0."""
    valid: int
    """Columns [0, valid) are in the vocabulary, the rest are padding of the LM head."""


@dataclass(frozen=True, slots=True)
class Partials:
    """Per row, over this shard's valid columns; rows whose target is IGNORE are all 0."""

    row_max_N: Tensor
    """max x; -inf where the shard has no valid column or holds only -inf."""
    sum_exp_N: Tensor
    """sum exp((x - max) / T)."""
    target_logit_N: Tensor
    """x[target] where this shard owns the target, else 0."""
    owned_N: Tensor
    """1 where this shard owns the target, else 0 (float, so that it sums with the others)."""
    weighted_N: Tensor | None
    """sum ((x - max) / T) exp((x - max) / T), for the entropy; None where it was not asked for."""


@dataclass(frozen=True, slots=True)
class TailPartials:
    """Per row, over this shard's valid columns that are not among the row's K listed ids."""

    tail_max_N: Tensor
    """max x; -inf where nothing finite is left."""
    sum_exp_N: Tensor
    """sum exp((x - max) / T)."""
    picked_NK: Tensor
    """x at each listed id that this shard owns, else 0."""
    weighted_N: Tensor | None
    """sum ((x - max) / T) exp((x - max) / T), for the entropy; None where it was not asked for."""


@dataclass(frozen=True, slots=True)
class RowStats:
    """The softmax's normaliser over the whole vocabulary: p = exp((x - max) / T - log_sum)."""

    row_max_N: Tensor
    log_sum_N: Tensor

    def rows(self, block: slice) -> RowStats:
        """Of a block of rows."""
        return RowStats(self.row_max_N[block], self.log_sum_N[block])


def shift_to(partial_max_N: Tensor, sum_exp_N: Tensor, max_N: Tensor, temperature: float) -> Tensor:
    """[N] (m - M) / T: what moves a partial with maximum m to the common maximum M.

    0 where the partial's sum is 0 (no finite logit: m is -inf, and -inf - M may be NaN; the sum
    stays 0) or NaN (NaN logits: the NaN lives on).
    """
    return torch.where(sum_exp_N > 0, (partial_max_N - max_N) / temperature, 0.0)


def merge(a: Partials, b: Partials, temperature: float) -> Partials:
    """Partials of two disjoint sets of columns as one: the local form of the all-reduce."""
    row_max_N = torch.maximum(a.row_max_N, b.row_max_N)
    sum_exp_N = torch.zeros_like(row_max_N)
    weighted_N = None if a.weighted_N is None else torch.zeros_like(row_max_N)
    for part in (a, b):
        shift_N = shift_to(part.row_max_N, part.sum_exp_N, row_max_N, temperature)
        scale_N = shift_N.exp()
        sum_exp_N += scale_N * part.sum_exp_N
        if weighted_N is not None and part.weighted_N is not None:
            weighted_N += scale_N * (part.weighted_N + shift_N * part.sum_exp_N)
    return Partials(
        row_max_N,
        sum_exp_N,
        a.target_logit_N + b.target_logit_N,
        a.owned_N + b.owned_N,
        weighted_N,
    )


def concatenate(blocks: Sequence[Partials]) -> Partials:
    """Partials of consecutive blocks of rows as one."""
    weighted = [b.weighted_N for b in blocks if b.weighted_N is not None]
    return Partials(
        torch.cat([b.row_max_N for b in blocks]),
        torch.cat([b.sum_exp_N for b in blocks]),
        torch.cat([b.target_logit_N for b in blocks]),
        torch.cat([b.owned_N for b in blocks]),
        torch.cat(weighted) if weighted else None,
    )
