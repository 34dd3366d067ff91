"""Tokenizers are compared by content: not by bytes of a file, size or name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd_teachers.errors import TeacherError
from mopd_teachers.tokenizer_check import explain_difference, tokenizer_fingerprint


def make(folder: Path, change: Callable[[dict[str, Any]], None] = lambda spec: None) -> Path:
    """A byte-level BPE with two merges; `change` edits its tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<bos>", "<eos>", *alphabet, "ab", "cd"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("c", "d")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.save_pretrained(folder)
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    change(spec)
    path.write_text(json.dumps(spec, indent=7, sort_keys=True))
    return folder


def difference(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> str | None:
    a = tokenizer_fingerprint(make(tmp_path / "one"))
    b = tokenizer_fingerprint(make(tmp_path / "two", change))
    found = explain_difference(a, b)
    assert (found is None) == (a.digest == b.digest)
    return found


def test_same_content_in_other_bytes_is_the_same(tmp_path: Path) -> None:
    def unimportant(spec: dict[str, Any]) -> None:
        spec["truncation"] = {
            "direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0
        }  # fmt: skip

    assert difference(tmp_path, unimportant) is None
    assert difference(tmp_path / "again", lambda spec: None) is None


def test_c05_two_tokens_exchanged_at_equal_size(tmp_path: Path) -> None:
    def swap(spec: dict[str, Any]) -> None:
        vocab = spec["model"]["vocab"]
        vocab["x"], vocab["y"] = vocab["y"], vocab["x"]

    text = difference(tmp_path, swap)
    assert text is not None and "2 ids mean different tokens" in text
    assert "is 'x' in" in text and "'y' in" in text


def test_one_token_more(tmp_path: Path) -> None:
    def grow(spec: dict[str, Any]) -> None:
        spec["model"]["vocab"]["ef"] = 261

    text = difference(tmp_path, grow)
    assert text is not None and "vocabularies of 261 and 262" in text
    assert "id 261 is nothing in" in text and "'ef' in" in text


def test_merges_in_another_order(tmp_path: Path) -> None:
    def turn(spec: dict[str, Any]) -> None:
        spec["model"]["merges"].reverse()

    text = difference(tmp_path, turn)
    assert text == "merge 0: 'a b' against 'c d'"


def test_a_merge_less(tmp_path: Path) -> None:
    def lose(spec: dict[str, Any]) -> None:
        spec["model"]["merges"].pop()

    assert difference(tmp_path, lose) == "merge 1: 'c d' against nothing"


def test_normalizer_and_pre_tokenizer(tmp_path: Path) -> None:
    def lower(spec: dict[str, Any]) -> None:
        spec["normalizer"] = {"type": "Lowercase"}

    def regex(spec: dict[str, Any]) -> None:
        spec["pre_tokenizer"]["use_regex"] = True

    assert (difference(tmp_path / "n", lower) or "").startswith("normalizer: 'null' against")
    assert (difference(tmp_path / "p", regex) or "").startswith("pre-tokenizer: ")


def test_added_token_attributes(tmp_path: Path) -> None:
    def strip(spec: dict[str, Any]) -> None:
        spec["added_tokens"][2]["lstrip"] = True

    text = difference(tmp_path, strip)
    assert text is not None and text.startswith("added token 2: ") and "<eos>" in text


def test_a_bos_that_one_of_them_adds(tmp_path: Path) -> None:
    def add_bos(spec: dict[str, Any]) -> None:
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}},
        }

    text = difference(tmp_path, add_bos)
    assert text == "ids put before every text: () against (1,)"


def test_another_end_of_sequence(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    path = two / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["eos_token"] = "<pad>"
    path.write_text(json.dumps(config))
    text = explain_difference(tokenizer_fingerprint(one), tokenizer_fingerprint(two))
    assert text == "special token eos_token: '<eos>' against '<pad>'"


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match="no readable tokenizer at"):
        tokenizer_fingerprint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(TeacherError, match="is a file"):
        tokenizer_fingerprint(tmp_path / "file")
