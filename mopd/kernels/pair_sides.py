"""The two sides of a whole-vocabulary divergence as tiles of logits, and who computes on them.

Shapes: N rows, V columns of this rank's vocabulary shard, H hidden size, [n, c] one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.kernels.head import Head, column_blocks, row_blocks
from mopd.kernels.pair_partials import PairPartials, PairStats, PairSums
from mopd.kernels.partials import Columns, RowStats


class PairBackend(Protocol):
    """What `torch_pairs` and `triton_pairs` both are."""

    def pair_partials(
        self,
        a_NV: Tensor,
        b_NV: Tensor,
        live_N: Tensor,
        *,
        a_temperature: float,
        b_temperature: float,
        columns: Columns,
        weighted: bool,
    ) -> PairPartials: ...

    def jsd_sums(
        self,
        x_NV: Tensor,
        y_NV: Tensor,
        live_N: Tensor,
        student: RowStats,
        teacher: RowStats,
        *,
        temperature: float,
        teacher_temperature: float,
        columns: Columns,
        beta: float,
    ) -> PairSums: ...

    def write_pair_gradient(
        self,
        x_NV: Tensor,
        y_NV: Tensor,
        live_N: Tensor,
        stats: PairStats,
        grad_N: Tensor,
        out_NV: Tensor,
        *,
        direction: str,
        beta: float,
        temperature: float,
        teacher_temperature: float,
        columns: Columns,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class PairOptions:
    """What was asked for, beside the tensors."""

    backend: PairBackend
    direction: str
    beta: float
    temperature: float
    teacher_temperature: float
    columns: Columns
    group: dist.ProcessGroup | None
    inplace_backward: bool
    student_dtype: torch.dtype | None
    teacher_dtype: torch.dtype | None
    reduce_hidden_grad: bool


@dataclass(frozen=True, slots=True)
class PairSides:
    """Both distributions as tiles of logits."""

    x: Tensor
    weight: Tensor | None
    y: Tensor
    teacher_weight: Tensor | None
    live_N: Tensor
    options: PairOptions

    def columns(self) -> Iterator[slice]:
        """The valid columns: whole where both are logits already, else in blocks."""
        valid = self.options.columns.valid
        if self.weight is None and self.teacher_weight is None:
            return iter([slice(0, valid)])
        dtype = torch.promote_types(
            self.options.student_dtype or self.x.dtype, self.options.teacher_dtype or self.y.dtype
        )
        return column_blocks(self.x.shape[0], valid, dtype, self.x.device.type)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """(rows, columns) of every tile, columns inside."""
        rows = self.x.shape[0]
        if self.weight is None and self.teacher_weight is None:
            yield slice(0, rows), slice(0, self.options.columns.valid)
            return
        for block in row_blocks(rows):
            for part in self.columns():
                yield block, part

    def student(self, block: slice, part: slice) -> Tensor:
        if self.weight is None:
            return self.x[block, part]
        return Head(self.x, self.weight, self.options.student_dtype).tile(block, part)

    def teacher(self, block: slice, part: slice) -> Tensor:
        if self.teacher_weight is None:
            return self.y[block, part]
        return Head(self.y, self.teacher_weight, self.options.teacher_dtype).tile(block, part)

    def write_gradient(
        self, stats: PairStats, grad_N: Tensor, block: slice, part: slice, out_nc: Tensor
    ) -> None:
        options = self.options
        options.backend.write_pair_gradient(
            self.student(block, part),
            self.teacher(block, part),
            self.live_N[block],
            stats.rows(block),
            grad_N[block].contiguous(),
            out_nc,
            direction=options.direction,
            beta=options.beta,
            temperature=options.temperature,
            teacher_temperature=options.teacher_temperature,
            columns=tile_columns(part),
        )


def tile_columns(part: slice) -> Columns:
    return Columns(0, part.stop - part.start)
