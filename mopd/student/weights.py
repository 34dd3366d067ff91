"""Moving weights between Hugging Face tensors and the ranks' Megatron shards.

One mapping serves four things: loading a checkpoint, exporting one, and saving and loading Adam's
moments, which have the shapes of their parameters. That is what lets a run be resumed at another
parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.errors import ModelError
from mopd.student.exchange import Part, Plan, as_bytes, first_holders, joined, receive
from mopd.student.families.base import Slot
from mopd.student.files import TensorWriter
from mopd.student.tensor_files import SafetensorsFolder

BUCKET_BYTES = 256 * 1024**2


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
        change: Callable[[str, Tensor], None] = lambda _, __: None,
    ) -> dict[str, tuple[int, ...]]:
        """Whole tensors into one safetensors file, bucket by bucket; returns name -> shape.

        Every rank must call; rank 0 writes, and holds one bucket beside its own shard. The file
        appears whole or not at all. `change` may write into each tensor (a copy) before it goes
        into the file. Raises ModelError, on every rank, where it cannot be written.
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
                change(name, tensor)
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
        self,
        tensors: Mapping[str, Tensor],
        bucket_bytes: int = BUCKET_BYTES,
        to_cpu: bool = True,
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), on rank 0; nothing elsewhere. Every rank must exhaust
        it, without other collectives in between.

        to_cpu: else the tensors stay on the ranks' device.

        Each part travels once, from the first rank that holds it, in one message a rank and
        bucket, so that rank 0 holds no more than a bucket of whole tensors at a time.
        """
        for names, found in self.buckets(tensors, bucket_bytes, to_cpu):
            if dist.get_rank() == 0:
                yield from zip(names, found, strict=True)

    def buckets(
        self, tensors: Mapping[str, Tensor], bucket_bytes: int, to_cpu: bool
    ) -> Iterator[tuple[list[str], Iterator[Tensor]]]:
        """The names of each bucket's whole tensors, and on rank 0 the tensors, to be taken before
        the next bucket is asked for. Every rank must exhaust it; between two buckets the ranks may
        do other collectives."""
        plan = self.plan(tensors)
        rank = dist.get_rank()
        local = {part.key: tensors[name] for name, part in plan.mine.items()}
        for bucket in plan.buckets(bucket_bytes):
            names = [name for part in bucket.tensors for name in part.hf]
            if rank != 0:
                parts = bucket.owned[rank]
                if parts:
                    dist.send(as_bytes([local[part.key] for part in parts]), dst=0)
                yield names, iter(())
                continue
            shards: dict[tuple[str, ...], dict[int, Tensor]] = {}
            for source, parts in enumerate(bucket.owned):
                if source == 0:
                    values = [local[part.key].detach() for part in parts]
                else:
                    device = next(iter(tensors.values())).device
                    values = receive(parts, source, device) if parts else []
                if to_cpu:
                    values = [value.cpu() for value in values]
                for part, value in zip(parts, values, strict=True):
                    shards.setdefault(part.hf, {})[part.shard[0]] = value
            yield names, joined(bucket, shards)

    def manifest(
        self, tensors: Mapping[str, Tensor]
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Hugging Face name -> (dtype, shape) of what `stream` gives, in its order. Collective."""
        return self.plan(tensors).manifest()

    def plan(self, tensors: Mapping[str, Tensor]) -> Plan:
        """Who sends what. Collective. Asked of the other ranks every time: what one rank has seen
        before (a pipeline stage without routers: its trained tensors are all of them) another may
        not."""
        mine = {
            name: Part(
                self._slots[name].hf,
                self._slots[name].packing,
                self._shard[name],
                tuple(tensor.shape),
                tensor.dtype,
            )
            for name, tensor in tensors.items()
        }
        by_rank: list[list[Part]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, list(mine.values()))
        return Plan(mine, first_holders(by_rank))
