"""Moving weights between Hugging Face tensors and the ranks' Megatron shards.

One mapping serves four things: loading a checkpoint, exporting one, and saving and loading Adam's
moments, which have the shapes of their parameters. That is what lets a run be resumed at another
parallel layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from mopd.errors import ModelError
from mopd.student.families.base import Slot
from mopd.student.packing import Packing

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

    def load(self, source: SafetensorsFolder, into: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of `source` into tensors given by Megatron name."""
        with torch.no_grad():
            for name, target in into.items():
                slot = self._slots[name]
                full = [source.get(hf) for hf in slot.hf]
                value = slot.packing.shard(full, *self._shard[name])
                assert value.shape == target.shape, (name, value.shape, target.shape)
                target.copy_(value)

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Whole Hugging Face tensors on rank 0 (CPU), None elsewhere. Every rank must call.

        `tensors` by Megatron name: the parameters, or anything of their shapes. Each part travels
        once, from the first rank that holds it.
        """
        parts = {
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
        dist.all_gather_object(by_rank, list(parts.values()))
        owned = _first_holders(by_rank)
        rank = dist.get_rank()
        mine = owned[rank]
        local = {parts[name].key: tensor for name, tensor in tensors.items()}
        # One byte buffer a rank: dtypes may differ between tensors, and one message is cheap.
        if rank != 0:
            if mine:
                dist.send(_as_bytes([local[part.key] for part in mine]), dst=0)
            return None
        shards: dict[tuple[str, ...], dict[int, Tensor]] = {}
        packing: dict[tuple[str, ...], _Part] = {}
        for source, owned_parts in enumerate(owned):
            if not owned_parts:
                continue
            if source == 0:
                values = [local[part.key].detach().cpu() for part in owned_parts]
            else:
                values = _receive(owned_parts, source, next(iter(tensors.values())).device)
            for part, value in zip(owned_parts, values, strict=True):
                shards.setdefault(part.hf, {})[part.shard[0]] = value
                packing[part.hf] = part
        out: dict[str, Tensor] = {}
        for names, found in shards.items():
            part = packing[names]
            assert len(found) == part.shard[1], (names, sorted(found))
            joined = part.packing.join([found[i] for i in range(part.shard[1])])
            # .clone(): safetensors refuses views that share storage.
            out.update(zip(names, (t.clone().contiguous() for t in joined), strict=True))
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
