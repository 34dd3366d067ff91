"""What a Hugging Face checkpoint folder says of itself, read without torch or transformers."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.errors import ModelError


@dataclass(frozen=True)
class ModelLimits:
    """The numbers of ``config.json`` that layouts and lengths are checked against."""

    max_position_embeddings: int  # tokens, prompt and response together
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int  # 0 for a dense model


_NAMES: dict[str, tuple[str, ...]] = {
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "vocab_size": ("vocab_size",),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?$")


def read_model_limits(path: str | Path) -> ModelLimits:
    """Limits from ``PATH/config.json``; ModelError names what is missing or not a number."""
    file = Path(path) / "config.json"
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: expected a JSON object")
    # Multimodal checkpoints keep the language model's numbers one level down.
    if isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    found: dict[str, int] = {}
    for field, names in _NAMES.items():
        name = next((name for name in names if config.get(name) is not None), None)
        if name is None:
            if field == "num_kv_heads":  # absent: every head has its own
                found[field] = found["num_heads"]
            elif field == "num_experts":
                found[field] = 0
            else:
                raise ModelError(f"{file}: no {' or '.join(names)}")
            continue
        value = config[name]
        if type(value) is not int or value < (0 if field == "num_experts" else 1):
            raise ModelError(f"{file}: {name} should be a positive whole number, got {value!r}")
        found[field] = value
    return ModelLimits(**found)


def folder_problem(path: str | Path) -> str | None:
    """What keeps a folder from being a loadable checkpoint, or None.

    Wanted: ``config.json``, and weights as ``*.safetensors``, with every shard an index names.
    """
    folder = Path(path)
    if not folder.exists():
        return f"{folder} does not exist (working directory {Path.cwd()})"
    if not folder.is_dir():
        return f"{folder} is a file, expected a checkpoint folder"
    wanted = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            shards = sorted(set(files))
        except (ValueError, KeyError, AttributeError, TypeError):
            return f"{index} is not a safetensors index"
        wanted += [shard for shard in shards if not (folder / shard).is_file()]
    elif not any(folder.glob("*.safetensors")):
        wanted.append("*.safetensors")
    return f"{folder} has no {', no '.join(wanted)}" if wanted else None


def is_hub_name(model: str) -> bool:
    """Whether `model` can only be meant as a Hugging Face hub name (``org/name``).

    Not if it exists here, looks like a path, or its first part is a folder here: ``demo/spell``
    beside a folder ``demo`` is a misspelt path, and must not turn into a download.
    """
    if Path(model).exists() or not _HUB_NAME.match(model) or "/" not in model:
        return False
    return not Path(model.partition("/")[0]).is_dir()


def hub_cache_folder(model: str) -> Path | None:
    """The newest snapshot of a hub model in this machine's cache, or None."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    snapshots = hub / f"models--{model.replace('/', '--')}" / "snapshots"
    if not snapshots.is_dir():
        return None
    found = [each for each in snapshots.iterdir() if (each / "config.json").exists()]
    return max(found, key=lambda each: each.stat().st_mtime, default=None)


def hub_is_offline() -> bool:
    """Whether the environment forbids downloads, by the hub's own variables."""
    return any(
        os.environ.get(name, "").strip().upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
