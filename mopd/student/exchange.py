"""Who sends what, when the ranks' parts of the model are put together.

A tensor (or a pack of tensors that Megatron keeps as one) is cut into shards; of a shard that
several ranks hold, the first of them speaks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.student.packing import Packing


@dataclass(frozen=True)
class Part:
    """One parameter of one rank, as the others need to know it."""

    hf: tuple[str, ...]
    packing: Packing
    shard: tuple[int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> tuple[tuple[str, ...], int]:
        return self.hf, self.shard[0]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    tensors: list[Part]
    """One part of each tensor (or pack of tensors) that is put together."""
    owned: list[list[Part]]
    """Per rank, what it sends."""


@dataclass(frozen=True)
class Plan:
    """How whole tensors are put together from the ranks' parts; the same on every rank."""

    mine: dict[str, Part]
    """This rank's parts by Megatron name."""
    owned: list[list[Part]]
    """Per rank, the parts that no lower rank holds."""

    def buckets(self, limit: int) -> list[Bucket]:
        """Whole tensors in order of first appearance, at most `limit` bytes (or one) together."""
        sizes: dict[tuple[str, ...], int] = {}
        first: dict[tuple[str, ...], Part] = {}
        for part in (part for parts in self.owned for part in parts):
            sizes[part.hf] = sizes.get(part.hf, 0) + part.nbytes
            first.setdefault(part.hf, part)
        groups: list[list[tuple[str, ...]]] = []
        used = 0
        for names, size in sizes.items():
            if not groups or used + size > limit:
                groups.append([])
                used = 0
            groups[-1].append(names)
            used += size
        return [
            Bucket(
                [first[names] for names in group],
                [[p for p in parts if p.hf in wanted] for parts in self.owned],
            )
            for group in groups
            for wanted in [set(group)]
        ]

    def manifest(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Hugging Face name -> (dtype, shape), in the order of the stream."""
        shapes: dict[tuple[str, ...], dict[int, Part]] = {}
        for part in (part for parts in self.owned for part in parts):
            shapes.setdefault(part.hf, {})[part.shard[0]] = part
        out = {}
        for names, parts in shapes.items():
            shards = [
                torch.empty(parts[i].shape, dtype=parts[i].dtype, device="meta")
                for i in range(len(parts))
            ]
            for name, tensor in zip(names, parts[0].packing.join(shards), strict=True):
                out[name] = (tensor.dtype, tuple(tensor.shape))
        return out


def joined(bucket: Bucket, shards: dict[tuple[str, ...], dict[int, Tensor]]) -> Iterator[Tensor]:
    """The bucket's whole tensors, each once it is asked for; empties `shards`."""
    for part in bucket.tensors:
        found = shards.pop(part.hf)
        assert len(found) == part.shard[1], (part.hf, sorted(found))
        for tensor in part.packing.join([found[i] for i in range(part.shard[1])]):
            # .clone(): what is handed out must not change with the next step.
            yield tensor.clone().contiguous()


def first_holders(by_rank: list[list[Part]]) -> list[list[Part]]:
    """Per rank, the parts that no lower rank holds."""
    seen: set[tuple[tuple[str, ...], int]] = set()
    owned: list[list[Part]] = []
    for parts in by_rank:
        new = []
        for part in parts:
            if part.key not in seen:
                seen.add(part.key)
                new.append(part)
        owned.append(new)
    return owned


def as_bytes(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def receive(parts: list[Part], source: int, device: torch.device) -> list[Tensor]:
    buffer = torch.empty(sum(p.nbytes for p in parts), dtype=torch.uint8, device=device)
    dist.recv(buffer, src=source)
    pieces = buffer.split([p.nbytes for p in parts])
    # .clone(): a slice may start at an address the wider dtype cannot view.
    return [
        piece.clone().view(p.dtype).view(p.shape) for piece, p in zip(pieces, parts, strict=True)
    ]
