"""A Hugging Face checkpoint's tensors: found by name, compared with what is expected, read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mopd.errors import ModelError

_SHOWN = 8
_FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors' names of what weights and moments may be kept in. Quantised ones are numbers of
another meaning."""


class SafetensorsFolder:
    """Tensors by name from ``*.safetensors``, one file or several with an index."""

    def __init__(self, source: Path) -> None:
        """`source`: a file, or a folder with model.safetensors(.index.json)."""
        self.source = source
        files = self._files()
        self._opened: dict[str, Any] = {}
        """Tensor name -> its file."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for file in files:
            try:
                # Left open: to open it is to read its header, which names every tensor.
                opened = safe_open(file, framework="pt")
                for name in opened.keys():
                    self._opened[name] = opened
                    tensor = opened.get_slice(name)
                    self.shapes[name] = tuple(tensor.get_shape())
                    self._dtypes[name] = tensor.get_dtype()
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
            try:
                names = set(json.loads(index.read_text())["weight_map"].values())
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(
                    f"{index}: not a safetensors index ({type(error).__name__}: {error}). Expected "
                    'a JSON object with "weight_map": tensor name -> file name.'
                ) from error
            files = [source / str(name) for name in sorted(names, key=str)]
            whole = source / "model.safetensors"
            if whole.is_file() and whole not in files:
                raise ModelError(
                    f"{source}: both model.safetensors and the files of {index.name} are there; "
                    "some programs read the one, some the others. Remove what is not meant."
                )
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
            _named(
                f"of another type than {', '.join(_FLOATS)}",
                [
                    f"{name} ({self._dtypes[name]})"
                    for name in sorted(expected.keys() & got.keys())
                    if self._dtypes[name] not in _FLOATS
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
        if name not in self._opened:
            raise ModelError(f"{self.source}: holds no tensor {name!r}.")
        tensor: Tensor = self._opened[name].get_tensor(name)
        return tensor


def _named(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"
