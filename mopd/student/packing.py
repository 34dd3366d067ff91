"""How full Hugging Face tensors become one Megatron shard, and back. Pure functions of tensors.

Legend: H hidden, F feed-forward, V vocabulary, G key/value groups, D head size, Q query heads per
group. `size` shards, of which `rank` is one. Every packing is exact: ``join`` of all ``shard``s
returns the tensors it was given, bit for bit.

`pairs` says the same without copying: which part of a shard is which part of a full tensor, so that
a rank can write its own part of tensors that it never holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


class Packing(ABC):
    """Full tensors <-> shards."""

    split: ClassVar[bool] = True
    """False when every rank holds the whole tensor."""

    @abstractmethod
    def shard(self, full: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Shard `rank` of `size`."""

    @abstractmethod
    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The full tensors, from all shards in order."""

    @abstractmethod
    def pairs(
        self, shard: Tensor, full: Sequence[Tensor], rank: int, size: int
    ) -> list[tuple[Tensor, Tensor]]:
        """For each full tensor, views (of `shard`, of it) of equal shape that hold the same
        numbers; both must be contiguous. Empty where the shard holds none of a tensor."""


@dataclass(frozen=True)
class Whole(Packing):
    """The same tensor on every rank (norms, routers)."""

    split: ClassVar[bool] = False

    def shard(self, full: Sequence[Tensor], rank: int, size: int) -> Tensor:
        (tensor,) = full
        return tensor

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0]]

    def pairs(
        self, shard: Tensor, full: Sequence[Tensor], rank: int, size: int
    ) -> list[tuple[Tensor, Tensor]]:
        (tensor,) = full
        return [(shard, tensor)]


@dataclass(frozen=True)
class Along(Packing):
    """One tensor cut along `dim` into equal parts (o_proj, down_proj)."""

    dim: int

    def shard(self, full: Sequence[Tensor], rank: int, size: int) -> Tensor:
        (tensor,) = full
        return tensor.chunk(size, self.dim)[rank]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards), self.dim)]

    def pairs(
        self, shard: Tensor, full: Sequence[Tensor], rank: int, size: int
    ) -> list[tuple[Tensor, Tensor]]:
        (tensor,) = full
        return [(shard, tensor.chunk(size, self.dim)[rank])]


@dataclass(frozen=True)
class VocabularyRows(Packing):
    """[V, H] cut by rows after zero rows were added so that it divides; `join` drops them."""

    rows: int

    def shard(self, full: Sequence[Tensor], rank: int, size: int) -> Tensor:
        (tensor,) = full
        per_rank = -(-self.rows // size)
        part = tensor[rank * per_rank : (rank + 1) * per_rank]
        missing = per_rank - part.shape[0]
        if missing:
            part = torch.cat([part, part.new_zeros(missing, part.shape[1])])
        return part

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards))[: self.rows]]

    def pairs(
        self, shard: Tensor, full: Sequence[Tensor], rank: int, size: int
    ) -> list[tuple[Tensor, Tensor]]:
        (tensor,) = full
        part = tensor[rank * len(shard) : (rank + 1) * len(shard)]
        return [(shard[: len(part)], part)]


@dataclass(frozen=True)
class GroupedQKV(Packing):
    """q [G*Q*D, H], k and v [G*D, H] -> per group (q heads, k, v), groups spread over ranks."""

    groups: int
    queries_per_group: int
    head_size: int

    def shard(self, full: Sequence[Tensor], rank: int, size: int) -> Tensor:
        q, k, v = (t.view(self.groups, -1, t.shape[-1]) for t in full)
        return torch.cat([q, k, v], 1).chunk(size)[rank].reshape(-1, q.shape[-1])

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        packed = torch.cat(list(shards))
        packed = packed.view(self.groups, -1, packed.shape[-1])
        sizes = [self.queries_per_group * self.head_size, self.head_size, self.head_size]
        return [t.reshape(-1, packed.shape[-1]) for t in packed.split(sizes, 1)]

    def pairs(
        self, shard: Tensor, full: Sequence[Tensor], rank: int, size: int
    ) -> list[tuple[Tensor, Tensor]]:
        width = shard.shape[-1]
        grouped = [t.view(self.groups, -1, width) for t in full]
        own = shard.view(self.groups // size, -1, width).split([t.shape[1] for t in grouped], 1)
        return [(mine, t.chunk(size)[rank]) for mine, t in zip(own, grouped, strict=True)]


@dataclass(frozen=True)
class GateUp(Packing):
    """gate and up [F, H] -> this rank's rows of gate, then its rows of up."""

    def shard(self, full: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return torch.cat([t.chunk(size)[rank] for t in full])

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [s.chunk(2) for s in shards]
        return [torch.cat([h[i] for h in halves]) for i in (0, 1)]

    def pairs(
        self, shard: Tensor, full: Sequence[Tensor], rank: int, size: int
    ) -> list[tuple[Tensor, Tensor]]:
        own = shard.chunk(2)
        return [(mine, t.chunk(size)[rank]) for mine, t in zip(own, full, strict=True)]
