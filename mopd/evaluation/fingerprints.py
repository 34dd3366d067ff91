"""What an answer depends on, as hashes: the model, the set with its verifier, the sampling."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mopd.config.schema import VerifierConfig
from mopd.errors import ModelError
from mopd.types import Prompt

WHOLE_UP_TO = 4 * 2**30
"""Checkpoints up to this size (bytes) are hashed whole; of larger ones, blocks."""
_BLOCKS, _BLOCK = 64, 2**20
_READ = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def model_fingerprint(folder: Path) -> str:
    """Of the checkpoint's weights, configuration and tokenizer, whatever the folder is called.

    Above `WHOLE_UP_TO` each file counts by its size, its safetensors header, 64 blocks of 1 MiB
    spread evenly and its time of change: a copy is then another model, which costs an evaluation,
    while a changed file never passes for the old one.

    Raises:
        ModelError: there are no weights.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{folder}: no *.safetensors file; expected a Hugging Face checkpoint")
    whole = sum(file.stat().st_size for file in weights) <= WHOLE_UP_TO
    digest = hashlib.blake2b(digest_size=16)
    for name in _READ:
        path = folder / name
        digest.update(f"{name}:{path.read_bytes() if path.exists() else None!r}".encode())
    for path in weights:
        _hash_weights(digest, path, whole)
    return digest.hexdigest()


def _hash_weights(digest: Any, path: Path, whole: bool) -> None:
    size = path.stat().st_size
    digest.update(struct.pack("<QQ", size, 0 if whole else path.stat().st_mtime_ns))
    with path.open("rb") as file:
        if whole:
            while block := file.read(2**22):
                digest.update(block)
            return
        for k in range(_BLOCKS):  # the first holds the header's beginning
            file.seek(k * max(size - _BLOCK, 0) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))


def endpoint_fingerprint(url: str, model: str | None) -> str:
    """Of a server: its address and the name it serves; its weights cannot be seen."""
    return _hash({"url": url.rstrip("/"), "model": model})


def set_fingerprint(prompts: Sequence[Prompt], verifier: VerifierConfig | None) -> str:
    """Of the items (ids, tokens, references) and of who judges them, a user's code included."""
    return _hash(
        {
            "prompts": sorted(
                (p.id, list(p.token_ids), p.text, p.answer, _plain(p.metadata), *p.stop, *p.choices)
                for p in prompts
            ),
            "verifier": None if verifier is None else dataclasses.asdict(verifier),
            "code": None if verifier is None else _source(verifier.target),
        }
    )


def sampling_fingerprint(settings: Mapping[str, Any]) -> str:
    """Of temperature, response limit, seed and whatever else decides what is sampled."""
    return _hash(dict(settings))


def _source(target: str | None) -> str | None:
    """The text of the module that a verifier's `target` names; None where it is not a file."""
    if target is None:
        return None
    spec = importlib.util.find_spec(target.partition(":")[0])
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return Path(spec.origin).read_text(encoding="utf-8", errors="replace")


def _plain(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, sort_keys=True, default=repr)


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
