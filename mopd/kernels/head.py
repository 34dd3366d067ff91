"""An LM head taken tile by tile: logits that are never whole, and the gradients they lead to.

A tile is a block of rows by a block of vocabulary columns. Its logits come from one matrix product
(cuBLAS on CUDA), a row kernel then reads them, and the next tile takes their place. The backward
makes each tile again, which is one product more than with logits kept: 4 instead of 3.

Columns are the outer loop of the backward, so that a block of the weight's gradient is finished
before the next begins and only the hidden states' gradient ([N, H], small beside [V, H]) is
accumulated over tiles, in float32.

Shapes: N rows, H hidden size, V vocabulary rows of this rank's weights, [n, c] one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}
"""Of a tile's logits. CUDA: 8192 x 32768 in bfloat16, for products at full speed and few passes
over the hidden states' gradient; CPU: so small that the row kernel finds the tile in cache."""

BLOCK_ROWS = 8192
"""Most rows of a tile; below that the weights are read once per pass."""

COLUMN_MULTIPLE = 128
"""Tiles begin at multiples of this, for the alignment that fast matrix products want."""


@dataclass(frozen=True, slots=True)
class Head:
    """Logits given as hidden states times the LM head's weights: hidden @ weight.T."""

    hidden_NH: Tensor
    weight_VH: Tensor
    """This rank's vocabulary shard, same dtype as the hidden states."""
    logits_dtype: torch.dtype | None = None
    """None: logits rounded to the weights' dtype, as an unfused head gives them. torch.float32:
    float32 logits of bfloat16 weights (an FP32 head)."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the tiles."""
        return self.logits_dtype or self.hidden_NH.dtype

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """[n, c] logits."""
        return _product(self.hidden_NH[rows], self.weight_VH[columns].t(), self.dtype)


def row_blocks(rows: int) -> Iterator[slice]:
    """Blocks of at most BLOCK_ROWS rows; none for no rows."""
    for begin in range(0, rows, BLOCK_ROWS):
        yield slice(begin, min(begin + BLOCK_ROWS, rows))


def column_blocks(rows: int, columns: int, dtype: torch.dtype, device: str) -> Iterator[slice]:
    """Even blocks of the valid columns, such that a tile of `dtype` has about TILE_BYTES."""
    budget = TILE_BYTES.get(device, TILE_BYTES["cuda"]) // dtype.itemsize
    most = max(COLUMN_MULTIPLE, budget // max(1, min(rows, BLOCK_ROWS)))
    count = -(-columns // most)
    if count == 0:
        return
    even = -(-columns // count)
    step = -(-even // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    for begin in range(0, columns, step):
        yield slice(begin, min(begin + step, columns))


class HeadGradient:
    """Collects d_hidden and d_weight from the tiles' d_logits, columns outside, rows inside."""

    def __init__(self, head: Head, *, hidden: bool, weight: bool) -> None:
        wide = torch.float64 if head.hidden_NH.dtype == torch.float64 else torch.float32
        self.head, self._wide = head, wide
        self.hidden_NH = torch.zeros_like(head.hidden_NH, dtype=wide) if hidden else None
        # zeros: padded rows are in no tile
        self.weight_VH = torch.zeros_like(head.weight_VH) if weight else None
        self._one_block = head.hidden_NH.shape[0] <= BLOCK_ROWS
        self._sum_cH: Tensor | None = None

    def add(self, rows: slice, columns: slice, grad_nc: Tensor) -> None:
        """One tile's d_logits, in the weights' dtype."""
        head = self.head
        if self.hidden_NH is not None:
            self.hidden_NH[rows] += _product(grad_nc, head.weight_VH[columns], self._wide)
        if self.weight_VH is None:
            return
        if self._one_block:
            torch.mm(grad_nc.t(), head.hidden_NH[rows], out=self.weight_VH[columns])
            return
        product_cH = _product(grad_nc.t(), head.hidden_NH[rows], self._wide)
        self._sum_cH = product_cH if self._sum_cH is None else self._sum_cH.add_(product_cH)

    def end_columns(self, columns: slice) -> None:
        """Every row block of these columns has been added."""
        if self._sum_cH is not None and self.weight_VH is not None:
            self.weight_VH[columns] = self._sum_cH
            self._sum_cH = None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with the sums in float32 or wider, as `dtype` (of the inputs, or wider)."""
    if dtype == a.dtype:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)  # CPU products have no output dtype of their own
