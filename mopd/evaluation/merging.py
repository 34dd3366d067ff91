"""Merged models as baselines: what can be had from the same checkpoints without any training.

    weight average      mean of the teachers' weights
    task arithmetic     base + scale * sum over the teachers of (teacher - base); arXiv 2212.04089

Both work tensor by tensor on Hugging Face safetensors, in float32, one tensor of every model in
memory at a time. Only teachers of the base's own architecture take part: every tensor must have
the base's name and shape.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mopd.errors import ModelError

Merge = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""(the base's tensor, the teachers') in float32 -> the merged one."""


def weight_average(base: Tensor, teachers: Sequence[Tensor]) -> Tensor:
    """Mean of the teachers; the base has no part in it."""
    return torch.stack(list(teachers)).mean(dim=0)


def task_arithmetic(scale: float) -> Merge:
    """base + scale * sum(teacher - base): scale 1/n is the average, 1 adds every task whole."""

    def merge(base: Tensor, teachers: Sequence[Tensor]) -> Tensor:
        return base + scale * (torch.stack(list(teachers)) - base).sum(dim=0)

    return merge


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it.

    Raises:
        ModelError: there are no weights, or a file is damaged.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a readable safetensors file ({error})") from error
    if not files:
        raise ModelError(f"{folder}: no *.safetensors file; expected a Hugging Face checkpoint")
    return files


def mergeable(base: Path, teachers: Mapping[str, Path]) -> tuple[dict[str, Path], list[str]]:
    """The teachers whose tensors are the base's by name and shape, and why others are not."""
    expected = _shapes(base)
    fitting: dict[str, Path] = {}
    reasons = []
    for name, folder in teachers.items():
        shapes = _shapes(folder)
        if shapes == expected:
            fitting[name] = folder
            continue
        odd = sorted(set(expected) ^ set(shapes)) or sorted(
            key for key in expected if expected[key] != shapes[key]
        )
        reasons.append(
            f"teacher {name} cannot be merged with the base: {len(odd)} tensors have other names "
            f"or shapes, the first is {odd[0]}"
        )
    return fitting, reasons


def merge_models(base: Path, teachers: Sequence[Path], merge: Merge, out: Path) -> None:
    """Write the merged checkpoint into `out`, with the base's configuration and tokenizer.

    Tensors that are not of floating point are the base's. Files and dtypes are the base's too.

    Raises:
        ModelError: no teacher is given, or one does not fit.
    """
    if not teachers:
        raise ModelError(f"nothing to merge with {base}: no teacher is of its architecture")
    _, reasons = mergeable(base, {str(folder): folder for folder in teachers})
    if reasons:
        raise ModelError("; ".join(reasons))
    theirs = [tensor_files(folder) for folder in teachers]
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(base, partial, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.pt"))
    by_file: dict[Path, list[str]] = {}
    for name, path in tensor_files(base).items():
        by_file.setdefault(path, []).append(name)
    for path, names in by_file.items():
        merged = {}
        for name in names:
            own = _tensor(path, name)
            if own.is_floating_point():
                parts = [_tensor(files[name], name).float() for files in theirs]
                merged[name] = merge(own.float(), parts).to(own.dtype).contiguous()
            else:
                merged[name] = own
        save_file(merged, partial / path.name, metadata={"format": "pt"})
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def write_note(out: Path, what: str, base: Path, teachers: Mapping[str, Path]) -> None:
    """``merge.json`` beside the weights: how they were made."""
    record = {
        "method": what,
        "base": str(base),
        "teachers": {k: str(v) for k, v in teachers.items()},
    }
    (out / "merge.json").write_text(json.dumps(record, indent=1) + "\n")


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(tensor_files(folder).values())):
        with safe_open(path, framework="pt") as file:
            shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    return shapes


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
