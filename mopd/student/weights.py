"""Moving weights between Hugging Face tensors and the ranks' Megatron shards.

One mapping serves four things: loading a checkpoint, exporting one, and saving and loading Adam's
moments, which have the shapes of their parameters. That is what lets a run be resumed at another
parallel layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from mopd.errors import ModelError
from mopd.student.families.base import Slot
from mopd.student.files import TensorWriter
from mopd.student.packing import Packing

BUCKET_BYTES = 256 * 1024**2
_SHOWN = 8


class SafetensorsFolder:
    """Tensors by name from ``*.safetensors``, one file or several with an index."""

    def __init__(self, source: Path) -> None:
        """`source`: a file, or a folder with model.safetensors(.index.json)."""
        self.source = source
        files = self._files()
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as f:
                    for name in f.keys():
                        self._file_of[name] = file
                        self.shapes[name] = tuple(f.get_slice(name).get_shape())
            except Exception as error:  # safetensors raises its own untyped errors
                raise ModelError(f"{file}: not a readable safetensors file ({error}).") from error

    def _files(self) -> list[Path]:
        source = self.source
        if source.is_file():
            return [source]
        if source.suffix == ".safetensors":
            raise ModelError(f"{source}: no such file. Expected one with the weights.")
        index = source / "model.safetensors.index.json"
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
            files = [source / name for name in sorted(names)]
        else:
            files = [source / "model.safetensors"]
        missing = [f for f in files if not f.is_file()]
        if missing:
            raise ModelError(
                f"{source}: no {missing[0].name}. Expected a Hugging Face checkpoint folder with "
                "model.safetensors, or the files named in model.safetensors.index.json."
            )
        return files

    def check(self, expected: Mapping[str, tuple[int, ...]], tied_head: bool = False) -> None:
        """Raise ModelError naming every kind of difference from `expected`, before any is read."""
        got = dict(self.shapes)
        if tied_head and "lm_head.weight" in got:
            # Some checkpoints store the tied head beside the embedding; it must be the same.
            head, embedding = self.get("lm_head.weight"), self.get("model.embed_tokens.weight")
            if not torch.equal(head, embedding):
                raise ModelError(
                    f"{self.source}: tie_word_embeddings is set, but lm_head.weight differs from "
                    "model.embed_tokens.weight. Untie the config or drop one of them."
                )
            del got["lm_head.weight"]
        problems = [
            _named("missing", sorted(expected.keys() - got.keys())),
            _named("unexpected", sorted(got.keys() - expected.keys())),
            _named(
                "of another shape",
                [
                    f"{name} {list(got[name])} (expected {list(expected[name])})"
                    for name in sorted(expected.keys() & got.keys())
                    if got[name] != tuple(expected[name])
                ],
            ),
        ]
        text = "; ".join(p for p in problems if p)
        if text:
            raise ModelError(
                f"{self.source}: tensors do not fit the model's config: {text}. Nothing was "
                "loaded. Check that config.json and the weights belong together."
            )

    def get(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ModelError(f"{self.source}: holds no tensor {name!r}.")
        with safe_open(self._file_of[name], framework="pt") as f:
            return f.get_tensor(name)


def _named(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"


@dataclass(frozen=True)
class _Part:
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


class ShardedWeights:
    """This rank's parameters and their places in the Hugging Face checkpoint."""

    def __init__(
        self,
        slots: Mapping[str, Slot],
        tensor_parallel: tuple[int, int],
        expert_tensor_parallel: tuple[int, int],
    ) -> None:
        """`slots` by Megatron name; the two pairs are (rank, size)."""
        self._slots = dict(slots)
        self._shard = {
            name: (expert_tensor_parallel if slot.expert else tensor_parallel)
            if slot.packing.split
            else (0, 1)
            for name, slot in slots.items()
        }

    def names(self, parameter: str) -> tuple[str, ...]:
        """Hugging Face names that Megatron's `parameter` is packed from."""
        return self._slots[parameter].hf

    def load(
        self,
        source: SafetensorsFolder,
        into: Mapping[str, Tensor],
        tick: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Copy this rank's part of `source` into tensors given by Megatron name; `tick` is told
        of each."""
        with torch.no_grad():
            for name, target in into.items():
                slot = self._slots[name]
                full = [source.get(hf) for hf in slot.hf]
                value = slot.packing.shard(full, *self._shard[name])
                assert value.shape == target.shape, (name, value.shape, target.shape)
                target.copy_(value)
                tick(name)

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Whole Hugging Face tensors on rank 0 (CPU), None elsewhere. Every rank must call.

        `tensors` by Megatron name: the parameters, or anything of their shapes.
        """
        found = dict(self.stream(tensors))
        return found if dist.get_rank() == 0 else None

    def write(
        self,
        tensors: Mapping[str, Tensor],
        path: Path,
        *,
        durable: bool = True,
        tick: Callable[[str], None] = lambda _: None,
    ) -> dict[str, tuple[int, ...]]:
        """Whole tensors into one safetensors file, bucket by bucket; returns name -> shape.

        Every rank must call; rank 0 writes, and holds one bucket beside its own shard. The file
        appears whole or not at all. Raises ModelError, on every rank, where it cannot be written.
        """
        manifest = self.manifest(tensors)
        writer: TensorWriter | None = None
        failure: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                writer = TensorWriter(path, manifest)
            except OSError as error:
                failure[0] = str(error)
        for name, tensor in self.stream(tensors):
            if writer is not None and failure[0] is None:
                try:
                    writer.add(name, tensor)
                except OSError as error:
                    failure[0] = str(error)  # the other ranks still send: go on receiving
            tick(name)
        if writer is not None:
            try:
                if failure[0] is None:
                    writer.finish(durable)
                else:
                    writer.abandon()
            except OSError as error:
                failure[0] = str(error)
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise ModelError(f"could not write {path}: {failure[0]}.")
        return {name: shape for name, (_, shape) in manifest.items()}

    def stream(
        self, tensors: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole CPU tensor), on rank 0; nothing elsewhere. Every rank must
        exhaust it, without other collectives in between.

        Each part travels once, from the first rank that holds it, in one message a rank and
        bucket, so that rank 0 holds no more than a bucket of whole tensors at a time.
        """
        plan = self._plan(tensors)
        rank = dist.get_rank()
        local = {part.key: tensors[name] for name, part in plan.mine.items()}
        for bucket in plan.buckets(bucket_bytes):
            if rank != 0:
                parts = bucket.owned[rank]
                if parts:
                    dist.send(_as_bytes([local[part.key] for part in parts]), dst=0)
                continue
            shards: dict[tuple[str, ...], dict[int, Tensor]] = {}
            for source, parts in enumerate(bucket.owned):
                if source == 0:
                    values = [local[part.key].detach().cpu() for part in parts]
                else:
                    device = next(iter(tensors.values())).device
                    values = _receive(parts, source, device) if parts else []
                for part, value in zip(parts, values, strict=True):
                    shards.setdefault(part.hf, {})[part.shard[0]] = value
            for part in bucket.tensors:
                found = shards.pop(part.hf)
                assert len(found) == part.shard[1], (part.hf, sorted(found))
                joined = part.packing.join([found[i] for i in range(part.shard[1])])
                # .clone(): what is handed out must not change with the next step.
                yield from zip(part.hf, (t.clone().contiguous() for t in joined), strict=True)

    def manifest(
        self, tensors: Mapping[str, Tensor]
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Hugging Face name -> (dtype, shape) of what `stream` gives, in its order. Collective."""
        return self._plan(tensors).manifest()

    def _plan(self, tensors: Mapping[str, Tensor]) -> _Plan:
        """Who sends what. Asked of the other ranks every time: what one rank has seen before (a
        pipeline stage without routers: its trained tensors are all of them) another may not."""
        mine = {
            name: _Part(
                self._slots[name].hf,
                self._slots[name].packing,
                self._shard[name],
                tuple(tensor.shape),
                tensor.dtype,
            )
            for name, tensor in tensors.items()
        }
        by_rank: list[list[_Part]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, list(mine.values()))
        return _Plan(mine, _first_holders(by_rank))


@dataclass(frozen=True)
class _Bucket:
    tensors: list[_Part]
    """One part of each tensor (or pack of tensors) that is put together."""
    owned: list[list[_Part]]
    """Per rank, what it sends."""


@dataclass(frozen=True)
class _Plan:
    """How whole tensors are put together from the ranks' parts; the same on every rank."""

    mine: dict[str, _Part]
    """This rank's parts by Megatron name."""
    owned: list[list[_Part]]
    """Per rank, the parts that no lower rank holds."""

    def buckets(self, limit: int) -> list[_Bucket]:
        """Whole tensors in order of first appearance, at most `limit` bytes (or one) together."""
        sizes: dict[tuple[str, ...], int] = {}
        first: dict[tuple[str, ...], _Part] = {}
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
            _Bucket(
                [first[names] for names in group],
                [[p for p in parts if p.hf in wanted] for parts in self.owned],
            )
            for group in groups
            for wanted in [set(group)]
        ]

    def manifest(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Hugging Face name -> (dtype, shape), in the order of the stream."""
        shapes: dict[tuple[str, ...], dict[int, _Part]] = {}
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


def _first_holders(by_rank: list[list[_Part]]) -> list[list[_Part]]:
    """Per rank, the parts that no lower rank holds."""
    seen: set[tuple[tuple[str, ...], int]] = set()
    owned: list[list[_Part]] = []
    for parts in by_rank:
        new = []
        for part in parts:
            if part.key not in seen:
                seen.add(part.key)
                new.append(part)
        owned.append(new)
    return owned


def _as_bytes(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def _receive(parts: list[_Part], source: int, device: torch.device) -> list[Tensor]:
    buffer = torch.empty(sum(p.nbytes for p in parts), dtype=torch.uint8, device=device)
    dist.recv(buffer, src=source)
    pieces = buffer.cpu().split([p.nbytes for p in parts])
    # .clone(): a slice may start at an address the wider dtype cannot view.
    return [
        piece.clone().view(p.dtype).view(p.shape) for piece, p in zip(pieces, parts, strict=True)
    ]
