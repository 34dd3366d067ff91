"""What one rank, or one tile, knows of two distributions A and B and of KL(A || B).

    S_a = sum exp(da),  da = (a - max a) / T_a      S_b, db alike      W = sum exp(da) (da - db)
    KL(A || B) = W / S_a - log S_a + log S_b

Values are of the raw logits, as in `mopd.kernels.partials`. Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.kernels.partials import RowStats, shift_to


@dataclass(frozen=True, slots=True)
class PairPartials:
    """Per row, over some columns; rows that are not live are all 0. float32 or float64."""

    a_max_N: Tensor
    a_sum_N: Tensor
    b_max_N: Tensor
    b_sum_N: Tensor
    weighted_N: Tensor
    """W; 0 where the KL was not asked for."""

    @classmethod
    def nothing(cls, live_N: Tensor, dtype: torch.dtype) -> PairPartials:
        """Of no column."""
        zeros_N = torch.zeros(live_N.shape, dtype=dtype, device=live_N.device)
        floor_N = zeros_N.masked_fill(live_N, float("-inf"))
        return cls(floor_N, zeros_N, floor_N.clone(), zeros_N.clone(), zeros_N.clone())

    def rows(self, block: slice) -> PairPartials:
        """A view of a block of rows."""
        return PairPartials(
            self.a_max_N[block],
            self.a_sum_N[block],
            self.b_max_N[block],
            self.b_sum_N[block],
            self.weighted_N[block],
        )

    def assign(self, other: PairPartials) -> None:
        """`other` copied into these tensors."""
        self.a_max_N.copy_(other.a_max_N)
        self.a_sum_N.copy_(other.a_sum_N)
        self.b_max_N.copy_(other.b_max_N)
        self.b_sum_N.copy_(other.b_sum_N)
        self.weighted_N.copy_(other.weighted_N)

    def moved_to(
        self, a_max_N: Tensor, b_max_N: Tensor, a_temperature: float, b_temperature: float
    ) -> PairPartials:
        """The same sums about other maxima, which are not below these."""
        a_shift_N = shift_to(self.a_max_N, self.a_sum_N, a_max_N, a_temperature)
        b_shift_N = shift_to(self.b_max_N, self.b_sum_N, b_max_N, b_temperature)
        scale_N = a_shift_N.exp()
        weighted_N = self.weighted_N + (a_shift_N - b_shift_N) * self.a_sum_N
        return PairPartials(
            a_max_N,
            scale_N * self.a_sum_N,
            b_max_N,
            b_shift_N.exp() * self.b_sum_N,
            # where: an infinite W (a token that B excludes) of columns that weigh nothing
            torch.where(scale_N == 0, 0.0, scale_N * weighted_N),
        )


@dataclass(frozen=True, slots=True)
class PairSums:
    """Some columns' share of two sums per row."""

    value_N: Tensor
    """The divergence."""
    mean_N: Tensor
    """sum p h, where h is the divergence's derivative in p, up to constants and factors."""


@dataclass(frozen=True, slots=True)
class PairStats:
    """What the backward of a divergence needs, over the whole vocabulary."""

    student: RowStats
    teacher: RowStats
    mean_N: Tensor
    """As in `PairSums`; the KL itself in the reverse direction, unused in the forward one."""

    def rows(self, block: slice) -> PairStats:
        """Of a block of rows."""
        return PairStats(self.student.rows(block), self.teacher.rows(block), self.mean_N[block])


def merge_pairs(
    parts: Sequence[PairPartials], a_temperature: float, b_temperature: float
) -> PairPartials:
    """Partials of disjoint sets of columns as one."""
    a_max_N = torch.stack([p.a_max_N for p in parts]).amax(dim=0)
    b_max_N = torch.stack([p.b_max_N for p in parts]).amax(dim=0)
    moved = [p.moved_to(a_max_N, b_max_N, a_temperature, b_temperature) for p in parts]
    return PairPartials(
        a_max_N,
        torch.stack([p.a_sum_N for p in moved]).sum(dim=0),
        b_max_N,
        torch.stack([p.b_sum_N for p in moved]).sum(dim=0),
        torch.stack([p.weighted_N for p in moved]).sum(dim=0),
    )
