"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor] | None, path: Path) -> dict[str, tuple[int, ...]]:
    """Write beside `path` and rename; returns name -> shape. Raises OSError.

    A reader of `path` sees the whole file, or the one that was there before.
    """
    assert tensors is not None, "only rank 0 has the tensors"
    temporary = path.with_name(f".{path.name}.partial")
    save_file(dict(tensors), temporary, metadata={"format": "pt"})
    _to_disk(temporary)
    os.replace(temporary, path)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def write_text(text: str, path: Path) -> None:
    path.write_text(text)
    _to_disk(path)


def replace_directory(new: Path, final: Path) -> None:
    """Put `new` in the place of `final`; at every moment one of them is whole on the disk."""
    previous = final.with_name(f".{final.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    if final.exists():
        os.replace(final, previous)
    os.replace(new, final)
    shutil.rmtree(previous, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
