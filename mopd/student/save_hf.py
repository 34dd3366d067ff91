"""A Hugging Face folder of the student: its settings, and the head's rows that no token has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_WEIGHTS = {".safetensors", ".bin", ".pt", ".gguf"}


def copy_settings(source: Path, out: Path, dtype: str) -> None:
    """Copy `source`'s config, tokenizer and other files, but no weights, into `out`.

    The config then says `dtype`. Raises OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not weights:
            shutil.copyfile(file, out / file.name)
    config_file = out / "config.json"
    settings = json.loads(config_file.read_text())
    settings["dtype"] = dtype
    config_file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def without_padding_tokens(head: str, valid_vocab: int) -> Callable[[str, Tensor], None]:
    """For `ShardedWeights.write`: make the rows of the head that no token has unlikely.

    Sampler and trainer leave them out, so that training holds nothing against them: their logits
    drift, and whoever serves the folder would sample them. They become the mean of the tokens'
    rows. Their logit is then the mean of the tokens' logits whatever the hidden state: never the
    largest, and the probability is the geometric mean of the tokens'. The shape stays the source's,
    which merging and further training from either folder count on.

    head: the head's name in the file, or the embedding's where they are tied (no input has these
    ids). valid_vocab: the tokenizer's ids.
    """

    def change(name: str, tensor: Tensor) -> None:
        if name == head and len(tensor) > valid_vocab:
            with torch.no_grad():
                tensor[valid_vocab:] = tensor[:valid_vocab].double().mean(0).to(tensor.dtype)

    return change
