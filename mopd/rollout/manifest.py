"""Names and shapes of the tensors in a Hugging Face checkpoint, read without loading them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from mopd.errors import ModelError, WeightSyncError

Manifest = Mapping[str, tuple[int, ...]]


def file_header(path: Path) -> bytes:
    """What a safetensors file says of its tensors: equal bytes are equal names, shapes and types.

    Raises:
        ModelError: the file is missing, truncated or not safetensors.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return file.read(length)
    except (OSError, struct.error, MemoryError, OverflowError) as error:
        raise ModelError(f"{path}: not a readable safetensors file ({error})") from error


def file_manifest(path: Path) -> dict[str, tuple[int, ...]]:
    """name -> shape of one safetensors file, from its header alone; raises as `file_header`."""
    try:
        header = json.loads(file_header(path))
    except ValueError as error:
        raise ModelError(f"{path}: not a readable safetensors file ({error})") from error
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def checkpoint_manifest(folder: Path) -> dict[str, tuple[int, ...]]:
    """name -> shape over every ``*.safetensors`` file of a checkpoint folder.

    Raises:
        ModelError: there is none, or one is not readable.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no *.safetensors file; expected a Hugging Face checkpoint")
    manifest: dict[str, tuple[int, ...]] = {}
    for file in files:
        manifest |= file_manifest(file)
    return manifest


def require_same_tensors(got: Manifest, expected: Manifest, what: str) -> None:
    """Refuse an update that would load only part of the model.

    Raises:
        WeightSyncError: a tensor is missing, unexpected or has another shape (each is named).
    """
    faults = [f"missing {name} {list(expected[name])}" for name in sorted(expected.keys() - got)]
    faults += [f"unexpected {name} {list(got[name])}" for name in sorted(got.keys() - expected)]
    faults += [
        f"{name}: shape {list(got[name])}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & got.keys())
        if tuple(got[name]) != tuple(expected[name])
    ]
    if faults:
        shown = "\n  ".join(faults[:20]) + ("\n  ..." if len(faults) > 20 else "")
        raise WeightSyncError(
            f"{what}: {len(faults)} tensor(s) differ from what the rollout engine expects, "
            f"nothing was loaded:\n  {shown}"
        )


def require_same_sums(got: Mapping[str, int], expected: Mapping[str, int], what: str) -> None:
    """Compare the fingerprints of what an engine holds with those of what the trainer sent.

    Raises:
        WeightSyncError: naming the tensors that differ.
    """
    wrong = sorted(n for n in got.keys() | expected.keys() if got.get(n) != expected.get(n))
    if wrong:
        shown = ", ".join(wrong[:20]) + (", ..." if len(wrong) > 20 else "")
        raise WeightSyncError(
            f"{what}: {len(wrong)} of {len(expected)} tensors did not arrive as the trainer has "
            f"them (their fingerprints differ): {shown}. The run stops."
        )
