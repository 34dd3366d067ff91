"""What one rank knows of each row's softmax from its own vocabulary columns.

Every backend makes `Partials`; `vocab_parallel.combine` turns them into `RowStats` over the whole
vocabulary; every backend's backward reads `RowStats`. Values are of the raw logits: the
temperature T is inside the exponent, exp((x - max) / T), which keeps the subtraction exact.

Shapes: N rows. Dtype: float32, or float64 where the logits are.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class RowStats:
    """The softmax's normaliser over the whole vocabulary: p = exp((x - max) / T - log_sum)."""

    row_max_N: Tensor
    log_sum_N: Tensor
