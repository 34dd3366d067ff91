"""The shipped demo models are what their manifest says, and the tool makes them again."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "demo" / "models"
ITEMS = 100  # held-out items a score is taken on here


def _tool() -> ModuleType:
    name = "make_demo_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="module")
def domains() -> dict:
    return _tool().load_domains(ROOT / "demo" / "domains.yaml")


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads((MODELS / "manifest.json").read_text())


def _noise(p: float, n: int) -> float:
    """Three standard errors of a proportion, never less than three items."""
    return max(3 * math.sqrt(p * (1 - p) / n), 3 / n)


def test_all_are_there_and_small(manifest: dict, domains: dict) -> None:
    assert set(manifest["models"]) == {"base", *(f"teacher_{name}" for name in domains)}
    size = sum(f.stat().st_size for f in MODELS.rglob("*") if f.is_file())
    assert size <= 25e6, f"{size / 1e6:.1f} MB"


def test_manifest_is_a_demo_worth_running(manifest: dict, domains: dict) -> None:
    for name in domains:
        base = manifest["models"]["base"]["held_out"][name]["exact"]
        teacher = manifest["models"][f"teacher_{name}"]["held_out"][name]["exact"]
        assert teacher >= 0.90
        assert teacher - base >= 0.25
        assert manifest["domains"][name]["majority_baseline"] < base / 2


def test_one_tokenizer_for_all(manifest: dict) -> None:
    tokenizers = [AutoTokenizer.from_pretrained(MODELS / name) for name in manifest["models"]]
    assert all(t.get_vocab() == tokenizers[0].get_vocab() for t in tokenizers)
    text = "back añ\n€:"
    ids = tokenizers[0](text)["input_ids"]
    assert len(ids) == len(text.encode()) and tokenizers[0].decode(ids) == text
    chat = [{"role": "user", "content": "a"}]
    assert tokenizers[0].apply_chat_template(chat, tokenize=False) == "a"


def test_scores_are_those_of_the_manifest(manifest: dict, domains: dict) -> None:
    tool = _tool()
    for name, entry in manifest["models"].items():
        model = AutoModelForCausalLM.from_pretrained(MODELS / name)
        tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
        assert model.config.architectures == [entry["architecture"]]
        assert model.dtype == torch.float32
        assert sum(p.numel() for p in model.parameters()) == entry["parameters"]
        assert model.config.eos_token_id == model.generation_config.eos_token_id == 258
        own = domains if name == "base" else [name.removeprefix("teacher_")]
        for domain in own:
            items = domains[domain].held_out[:ITEMS]
            got = tool.score(model, tokenizer, domains[domain], items)
            for kind, recorded in entry["held_out"][domain].items():
                assert abs(got[kind] - recorded) <= _noise(recorded, ITEMS), (name, domain, kind)


def test_the_row_without_a_token_has_next_to_no_probability(manifest: dict, domains: dict) -> None:
    tool = _tool()
    for name in manifest["models"]:
        model = AutoModelForCausalLM.from_pretrained(MODELS / name).eval()
        tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
        for domain in domains.values():
            ids, mask, labels = tool.encode_batch(tokenizer, domain.held_out[:ITEMS])
            with torch.no_grad():
                logprobs = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
            answers = labels[:, 1:] != -100
            # The rollout engine excludes the row whatever it says (test_rollout_pool.py).
            share = logprobs[:, :-1, len(tokenizer) :][answers].exp().mean()
            assert share < 1e-4, (name, domain.name)


@pytest.mark.slow
def test_the_tool_makes_a_teacher_again(tmp_path: Path, manifest: dict, domains: dict) -> None:
    shutil.copytree(MODELS / "base", tmp_path / "base")
    seed = manifest["models"]["teacher_backward"]["seed"]
    _tool().main(["--out", str(tmp_path), "--seed", str(seed), "--only", "backward"])
    made = json.loads((tmp_path / "manifest.json").read_text())["models"]["teacher_backward"]
    shipped = manifest["models"]["teacher_backward"]
    assert made["parameters"] == shipped["parameters"]
    got = made["held_out"]["backward"]["exact"]
    recorded = shipped["held_out"]["backward"]["exact"]
    assert abs(got - recorded) <= _noise(recorded, len(domains["backward"].held_out))
