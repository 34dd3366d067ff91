"""A configuration that is right, in a folder of its own, for tests to break one thing at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd.config import Config, load_config

GOOD = """\
name: try
student:
  model: base
  optimizer: {lr: 1e-3}
rollout: {max_response_tokens: 16}
teachers:
  math_rl: {model: teacher}
  code_rl: {endpoints: "http://10.0.0.7:8000"}
domains:
  math: {teacher: math_rl, prompts: math.jsonl, verifier: exact_match}
  code: {teacher: code_rl, prompts: {task: spell_backward, params: {max_word_len: 6}}}
train: {steps: 20, prompts_per_step: 8}
"""

MOE = {
    "max_position_embeddings": 128,
    "vocab_size": 259,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
}


def make_checkpoint(folder: Path, cut: int = 0, **changes: object) -> None:
    """What `check_config` looks at of a checkpoint; its weights lack their last `cut` bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {name: value for name, value in (MOE | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(numbers))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(8 - cut)
    (folder / "model.safetensors").write_bytes(weights)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "base")
    make_checkpoint(tmp_path / "teacher")
    (tmp_path / "math.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "good.yaml").write_text(GOOD)
    return tmp_path


@pytest.fixture
def loaded(place: Path) -> Callable[..., Config]:
    """Load the good configuration with overrides."""
    return lambda *overrides: load_config(["good.yaml"], overrides)


@pytest.fixture
def checkpoint() -> Callable[..., None]:
    return make_checkpoint
