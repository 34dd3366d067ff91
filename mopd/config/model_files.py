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
    stretched: bool = False  # RoPE scaling: it may read more than max_position_embeddings


_NAMES: dict[str, tuple[str, ...]] = {
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "vocab_size": ("vocab_size",),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}

_VOCABULARIES = (
    "tokenizer.json tokenizer.model vocab.json vocab.txt spiece.model sentencepiece.bpe.model "
    "tekken.json"
).split()
"""Files of which a tokenizer needs one, beside tokenizer_config.json."""

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
    return ModelLimits(**found, stretched=_stretched(config))


def _stretched(config: dict[str, Any]) -> bool:
    """Whether RoPE is scaled, by either name of the key; newer ones may have an entry a layer."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    entries = [scaling, *scaling.values()] if isinstance(scaling, dict) else []
    kinds = [e.get("rope_type", e.get("type")) for e in entries if isinstance(e, dict)]
    return any(kind not in (None, "default") for kind in kinds)


def folder_problem(path: str | Path) -> str | None:
    """What keeps a folder from being a loadable checkpoint, or None.

    Wanted: ``config.json``; weights as ``*.safetensors``, every shard an index names among them,
    each as long as its header says; a tokenizer.
    """
    folder = Path(path)
    if not folder.exists():
        return f"{folder} does not exist (working directory {Path.cwd()})"
    if not folder.is_dir():
        return f"{folder} is a file, expected a checkpoint folder"
    wanted = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            shards = sorted(set(files))
        except (ValueError, KeyError, AttributeError, TypeError):
            return f"{index} is not a safetensors index"
        wanted += [shard for shard in shards if not (folder / shard).is_file()]
    elif not shards:
        wanted.append("*.safetensors")
    wanted += _missing_of_tokenizer(folder)
    if wanted:
        return f"{folder} has no {', no '.join(wanted)}"
    return next(filter(None, (safetensors_problem(folder / shard) for shard in shards)), None)


def _missing_of_tokenizer(folder: Path) -> list[str]:
    """transformers makes up a tokenizer of a few ids, without a word, where these are missing."""
    missing = []
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        missing.append(_VOCABULARIES[0])
    if not (folder / "tokenizer_config.json").is_file():
        missing.append("tokenizer_config.json")
    return missing


def safetensors_problem(file: Path) -> str | None:
    """Whether a safetensors file is cut short (or is something else), by its header; or None.

    The header is read, the weights are not: 8 bytes of length, then JSON with each tensor's
    place in what follows.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            if start == b"version ":
                return f"{file} is a git-lfs pointer, not weights; run `git lfs pull` there"
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > size - 8:
                return f"{file} is cut short or no safetensors file ({size} bytes); copy it again"
            header = json.loads(opened.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name[:2] != "__"]
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        return f"{file} is no safetensors file: its header is not readable ({error})"
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        return f"{file} has {size} bytes, but its header speaks of {expected}; copy it again"
    return None


def is_hub_name(model: str) -> bool:
    """Whether `model` can only be meant as a Hugging Face hub name (``org/name``).

    Not if it exists here, looks like a path, or its first part is a folder here: ``demo/spell``
    beside a folder ``demo`` is a misspelt path, and must not turn into a download.
    """
    if Path(model).exists() or not _HUB_NAME.match(model) or "/" not in model:
        return False
    return not Path(model.partition("/")[0]).is_dir()


def hub_cache_folder(model: str, revision: str | None = None) -> Path | None:
    """The snapshot of a hub model in this machine's cache, or None: of a revision (a branch, tag
    or commit), or the newest."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    cached = hub / f"models--{model.replace('/', '--')}"
    snapshots = cached / "snapshots"
    if not snapshots.is_dir():
        return None
    found = [each for each in snapshots.iterdir() if (each / "config.json").exists()]
    if revision is not None:
        reference = cached / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else revision
        found = [each for each in found if each.name == commit]
    return max(found, key=lambda each: each.stat().st_mtime, default=None)
