"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
"""safetensors' names."""

Manifest = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensor name -> (dtype, shape)."""


def safetensors_header(manifest: Manifest) -> tuple[bytes, list[int]]:
    """(what a safetensors file of these tensors starts with, where in the file each one starts and
    where the last one ends)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = [0]
    for name, (dtype, shape) in manifest.items():
        stop = starts[-1] + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [starts[-1], stop],
        }
        starts.append(stop)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + start for start in starts]


class TensorWriter:
    """A safetensors file written tensor by tensor, so that nobody need hold all of them.

    Writes beside `path`; `finish` renames, so that a reader of `path` sees the whole file or the
    one that was there before. The tensors must come in the order of `manifest`.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Raises OSError, as do the other methods."""
        self._path, self._temporary = path, path.with_name(f".{path.name}.partial")
        self._expected = iter(manifest.items())
        self._file = self._temporary.open("wb")
        self._file.write(safetensors_header(manifest)[0])

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor (on the CPU)."""
        assert (name, (tensor.dtype, tuple(tensor.shape))) == next(self._expected), name
        self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    def finish(self, durable: bool) -> None:
        """Put the file in its place. `durable`: have it survive a power cut (fsync)."""
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())
        self._file.close()
        assert next(self._expected, None) is None
        os.replace(self._temporary, self._path)

    def abandon(self) -> None:
        """After an error: leave nothing behind."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write all of them (on the CPU) at once, durably. Raises OSError."""
    writer = TensorWriter(path, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()})
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish(durable=True)


def write_text(text: str, path: Path) -> None:
    path.write_text(text)
    to_disk(path)


def replace_directory(new: Path, final: Path) -> None:
    """Put `new` in the place of `final`; at every moment one of them is whole on the disk, under
    that name or where `recover` finds it."""
    previous = _previous(final)
    shutil.rmtree(previous, ignore_errors=True)
    if final.exists():
        os.replace(final, previous)
    os.replace(new, final)
    to_disk(final.parent)
    shutil.rmtree(previous, ignore_errors=True)


def recover(final: Path) -> None:
    """Undo half of a `replace_directory` that was killed between its two renames."""
    if not final.exists() and _previous(final).exists():
        os.replace(_previous(final), final)


def _previous(final: Path) -> Path:
    return final.with_name(f".{final.name}.previous")


def tree_to_disk(folder: Path) -> None:
    """Have everything below `folder`, whoever wrote it, survive a power cut."""
    for path in (*folder.rglob("*"), folder):
        to_disk(path)


def to_disk(path: Path) -> None:
    """The same of one file, or of the names in one folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
