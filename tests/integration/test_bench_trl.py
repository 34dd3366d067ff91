"""tools/bench_trl.py: its own checks, and a real measurement where `make bench-env` was run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import bench_trl

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-trl" / "bin" / "python"


def write(folder: Path, text: str) -> Path:
    path = folder / "prompts.json"
    path.write_text(text)
    return path


def test_prompts_are_read(tmp_path: Path) -> None:
    assert bench_trl.read_prompts(write(tmp_path, '["a", "b"]')) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "cannot be read as JSON"),
        ("[]", "expected a list of strings, not empty"),
        ('{"a": 1}', "expected a list of strings"),
        ('["a", 3]', "item 1 is 3"),
        ('["a", ""]', "item 1 is ''"),
    ],
)
def test_bad_prompts_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(bench_trl.BenchError, match=complaint):
        bench_trl.read_prompts(write(tmp_path, text))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(bench_trl.BenchError, match="--teacher .*no config.json"):
        bench_trl.require_folder(tmp_path, "teacher")


@pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-trl: make bench-env")
def test_a_tiny_measurement(tmp_path: Path) -> None:
    """The last line is the promised JSON, and it measured the shape that it says."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    config = Qwen3MoeConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=32, moe_intermediate_size=32,
        num_experts=4, num_experts_per_tok=2, mlp_only_layers=[], decoder_sparse_step=1,
        max_position_embeddings=64, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = tmp_path / "model"
    Qwen3MoeForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    command = [str(PYTHON), str(ROOT / "tools" / "bench_trl.py"), "--student", str(model)]
    command += ["--teacher", str(model), "--prompts", str(write(tmp_path, '["ab", "abc"]'))]
    command += ["--samples", "4", "--response-tokens", "3", "--steps", "2", "--warmup", "1"]
    command += ["--threads", "1", "--micro-batch", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["samples_per_step"] == 4 and result["response_tokens"] == 3
    assert len(result["all_seconds"]) == 2
    assert min(result["all_seconds"]) <= result["seconds_per_step"] <= max(result["all_seconds"])
    assert result["samples_per_s"] == pytest.approx(4 / result["seconds_per_step"])
    assert result["first_loss"] == pytest.approx(0, abs=1e-5)  # teacher == student
    assert result["frozen_routers"] == 1
    assert result["versions"]["trl"].startswith("1.16.")
