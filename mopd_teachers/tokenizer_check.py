"""Do two tokenizers mean the same by the same ids? Decided by content, never by file or size.

Left out on purpose: the padding token (nothing padded is scored), truncation and padding
settings, the chat template, and offsets; none of them changes what an id means.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd_teachers.errors import TeacherError

_ROLES = ("bos_token", "eos_token", "unk_token")
_SHOWN = 3
_SAMPLES = (
    "The quick brown fox, 12345 + 67 = 68412.\n\tx = {'k': [1, 2]}  # done",
    "  zwei  Leerzeichen, Ärger, naïve café, ½ ﬁ Å",
    "数学 математика 🙂👍🏽 ‮a\r\n",
)
"""Encoded by both; catches what the parts below do not name."""


@dataclass(frozen=True)
class Fingerprint:
    """Everything of a tokenizer that decides which ids a text becomes, and what they mean."""

    source: str
    vocabulary: Mapping[int, str]
    """id -> token, added tokens included."""
    special: Mapping[str, str | None]
    """bos, eos and unk: role -> token."""
    added: Mapping[int, Mapping[str, Any]]
    """id -> content, special, normalized, lstrip, rstrip, single_word."""
    prefix: tuple[int, ...]
    """Ids put before every text (BOS)."""
    suffix: tuple[int, ...]
    """Ids put after every text."""
    model: Mapping[str, Any]
    """Kind and options of the model (BPE, Unigram, ...), without vocabulary and merges."""
    merges: tuple[str, ...]
    """Merges (or scored pieces) in the order of their rank."""
    normalizer: str
    pre_tokenizer: str
    decoder: str
    encodings: tuple[tuple[int, ...], ...]
    """Ids of `_SAMPLES`, without special tokens."""

    @property
    def digest(self) -> str:
        """SHA-256 of all of it but the source; equal for equal tokenizers."""
        parts = {k: v for k, v in self.__dict__.items() if k != "source"}
        text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_fingerprint(path: str | Path) -> Fingerprint:
    """Fingerprint of the tokenizer in a checkpoint folder (or of a Hugging Face model id).

    Raises TeacherError when there is none that can be read, or none with a `tokenizer.json`.
    """
    from transformers import AutoTokenizer

    if Path(path).exists() and not Path(path).is_dir():
        raise TeacherError(f"{path} is a file; expected a checkpoint folder with a tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # transformers raises nearly everything here
        raise TeacherError(
            f"no readable tokenizer at {path}: {type(error).__name__}: {error}"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TeacherError(
            f"the tokenizer at {path} has no tokenizer.json form; convert it with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    spec = json.loads(backend.to_str())
    model = dict(spec["model"])
    ranked = model.pop("merges", None) or []
    vocab = model.pop("vocab", None)
    if isinstance(vocab, list):  # Unigram: [[piece, score], ...] is the ranking
        ranked = vocab
    prefix, suffix = _added_around(tokenizer)
    return Fingerprint(
        source=str(path),
        vocabulary={i: token for token, i in sorted(tokenizer.get_vocab().items(), key=_second)},
        special={role: _text(getattr(tokenizer, role, None)) for role in _ROLES},
        added={
            entry["id"]: {k: v for k, v in entry.items() if k != "id"}
            for entry in spec.get("added_tokens", [])
        },
        prefix=prefix,
        suffix=suffix,
        model=model,
        merges=tuple(" ".join(map(str, m)) if isinstance(m, list) else str(m) for m in ranked),
        normalizer=_canonical(spec.get("normalizer")),
        pre_tokenizer=_canonical(spec.get("pre_tokenizer")),
        decoder=_canonical(spec.get("decoder")),
        encodings=tuple(
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in _SAMPLES
        ),
    )


def explain_difference(a: Fingerprint, b: Fingerprint) -> str | None:
    """The first difference in words, with the ids and tokens concerned; None if there is none."""
    for difference in (
        _vocabulary_difference(a, b),
        _mapping_difference("special token", a.special, b.special),
        _mapping_difference("added token", a.added, b.added),
        _plain_difference("ids put before every text", a.prefix, b.prefix),
        _plain_difference("ids put after every text", a.suffix, b.suffix),
        _plain_difference("normalizer", a.normalizer, b.normalizer),
        _plain_difference("pre-tokenizer", a.pre_tokenizer, b.pre_tokenizer),
        _plain_difference("decoder", a.decoder, b.decoder),
        _mapping_difference("model option", a.model, b.model),
        _ranking_difference(a, b),
        _plain_difference("ids of a sample text", a.encodings, b.encodings),
    ):
        if difference is not None:
            return difference
    return None


def _vocabulary_difference(a: Fingerprint, b: Fingerprint) -> str | None:
    ids = sorted(
        i
        for i in a.vocabulary.keys() | b.vocabulary.keys()
        if a.vocabulary.get(i) != b.vocabulary.get(i)
    )
    if not ids:
        return None
    shown = "; ".join(
        f"id {i} is {_quoted(a.vocabulary.get(i))} in {a.source}, "
        f"{_quoted(b.vocabulary.get(i))} in {b.source}"
        for i in ids[:_SHOWN]
    )
    return (
        f"{len(ids)} ids mean different tokens (vocabularies of {len(a.vocabulary)} and "
        f"{len(b.vocabulary)}): {shown}"
    )


def _mapping_difference(what: str, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> str | None:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            return f"{what} {key}: {a.get(key)!r} against {b.get(key)!r}"
    return None


def _plain_difference(what: str, a: Any, b: Any) -> str | None:
    return None if a == b else f"{what}: {a!r} against {b!r}"


def _ranking_difference(a: Fingerprint, b: Fingerprint) -> str | None:
    if a.merges == b.merges:
        return None
    shorter = min(len(a.merges), len(b.merges))
    rank = next((i for i in range(shorter) if a.merges[i] != b.merges[i]), shorter)
    got = [m.merges[rank] if rank < len(m.merges) else None for m in (a, b)]
    return f"merge {rank}: {_quoted(got[0])} against {_quoted(got[1])}"


def _added_around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that encoding with special tokens puts before and after the text's own."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    raise TeacherError(
        f"the tokenizer {tokenizer.name_or_path} encodes 'a' as {plain} without and as {full} "
        "with special tokens; expected the former inside the latter"
    )


def _canonical(part: Any) -> str:
    """JSON with sorted keys and without what touches offsets only."""

    def strip(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: strip(v) for k, v in node.items() if k != "trim_offsets"}
        return [strip(x) for x in node] if isinstance(node, list) else node

    return json.dumps(strip(part), sort_keys=True)


def _text(token: Any) -> str | None:
    return None if token is None else str(token)


def _second(pair: tuple[str, int]) -> int:
    return pair[1]


def _quoted(token: str | None) -> str:
    return "nothing" if token is None else repr(token)
