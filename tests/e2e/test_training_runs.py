"""The whole system, every part real, on the quickstart's models: short runs.

Vllm engines and teacher servers, two Megatron ranks, Ray, verifiers, sync, evaluation, report.
"""

from __future__ import annotations

import json
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mopd_process import QUICKSTART, ROOT, SMALL, MopdProcess, json_lines, run_mopd
from safetensors.torch import load_file

DOMAINS: list[str] = list(yaml.safe_load((ROOT / QUICKSTART).read_text())["domains"])
FOURTH = "examples/fourth_domain/domain.yaml"


def arguments(runs: Path, name: str, *more: str, held_out: int = 40) -> list[str]:
    sizes = [f"domains.{domain}.held_out={held_out}" for domain in DOMAINS]
    return ["train", QUICKSTART, f"run_dir={runs}", f"name={name}", *SMALL, *sizes, *more]


@pytest.fixture(scope="module")
def four_domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with a fourth domain that is given by configuration alone."""
    runs = tmp_path_factory.mktemp("runs")
    run_mopd(
        arguments(
            runs, "four", FOURTH, "train.steps=4", "train.checkpoint_every=2", "evaluation.every=2"
        ),
        runs / "four.log",
    )
    return runs / "four"


def test_a_fourth_domain_joins_by_configuration_alone(four_domains: Path) -> None:
    (fourth,) = yaml.safe_load((ROOT / FOURTH).read_text())["domains"]
    steps = json_lines(four_domains / "metrics.jsonl")
    assert all(f"domain/{fourth}/reverse_kl" in step for step in steps)
    assert all(step[f"domain/{fourth}/reward"] is not None for step in steps)
    retention = json.loads((four_domains / "retention.json").read_text())
    assert set(retention["domains"]) == {*DOMAINS, fourth}


def test_retention_json_has_its_stable_keys(four_domains: Path) -> None:
    retention = json.loads((four_domains / "retention.json").read_text())
    assert "mean_headroom_captured" in retention
    for entry in retention["domains"].values():
        assert {"base", "teacher", "student", "retention", "headroom_captured", "n", "ci95"} <= set(
            entry
        )
        assert 0 <= entry["base"] <= 1 and 0 <= entry["teacher"] <= 1 and 0 <= entry["student"] <= 1
        low, high = entry["ci95"]
        assert low is None or high is None or low <= high


def test_metrics_say_what_each_domain_and_stage_did(four_domains: Path) -> None:
    steps = json_lines(four_domains / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step["samples"] == 24
        assert step["failures/fraction"] == 0
        assert step["sync/probe_error"] < 1e-3
        assert step["grad_norm"] > 0
        assert abs(step["train_rollout_kl_k3"]) < 1e-4  # the engines hold the trainer's weights
        assert all(step[f"time/{s}_s"] > 0 for s in ("generate", "score", "train", "sync"))
    assert len({step["loss"] for step in steps}) == 4
    evaluations = json_lines(four_domains / "evaluations.jsonl")
    assert {(e["who"], e["step"]) for e in evaluations} == {
        ("base", 0),
        ("teacher", 0),
        ("student", 2),
        ("student", 4),
    }
    assert list((four_domains / "tensorboard").iterdir())


def test_the_report_stands_alone(four_domains: Path) -> None:
    html = (four_domains / "report.html").read_text()

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            for key, value in attrs:
                if key in ("src", "href"):
                    assert value and value.startswith(("#", "data:")), (tag, key, value)

    Links().feed(html)
    assert all(domain in html for domain in DOMAINS) and "<svg" in html


def test_the_final_student_loads_as_a_hugging_face_model(four_domains: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(four_domains / "student", dtype=torch.float32)
    assert len(AutoTokenizer.from_pretrained(four_domains / "student")) <= model.config.vocab_size
    base = load_file(ROOT / "demo/models/base/model.safetensors")
    now = load_file(four_domains / "student/model.safetensors")
    assert base.keys() == now.keys()
    moved = {name for name in base if not torch.equal(base[name], now[name])}
    routers = {name for name in base if name.endswith("mlp.gate.weight")}
    assert routers and not moved & routers  # C30: routers are frozen, bit for bit
    assert any("experts" in name for name in moved) and "lm_head.weight" in moved


def test_the_resolved_configuration_can_be_run_again(four_domains: Path) -> None:
    from mopd.config.load import load_config

    assert load_config([four_domains / "config.yaml"]).train.steps == 4


@pytest.mark.parametrize("how", ["terminal", "terminate"])
def test_ctrl_c_saves_leaves_nothing_behind_and_resumes(tmp_path: Path, how: str) -> None:
    def metrics() -> list[dict[str, Any]]:
        path = tmp_path / "stop/metrics.jsonl"
        return json_lines(path) if path.exists() else []

    run = MopdProcess(arguments(tmp_path, "stop", "train.steps=500"), tmp_path / "first.log")
    try:
        run.wait_until(lambda: len(metrics()) >= 2, 240)
        if how == "terminal":
            run.interrupt_as_a_terminal()
        else:
            run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 130, run.text()
        assert run.left_over() == []
    finally:
        run.end()
    done = metrics()[-1]["step"]
    assert "resume=true" in run.text()
    assert (tmp_path / f"stop/checkpoints/step_{done:06d}").is_dir()
    if how == "terminate":
        return
    last = f"train.steps={done + 2}"
    run_mopd(arguments(tmp_path, "stop", last, "resume=true"), tmp_path / "second.log")
    assert [step["step"] for step in metrics()] == list(range(1, done + 3))
    assert (tmp_path / "stop/retention.json").exists()


def test_swapped_teachers_do_the_harm_they_must(tmp_path: Path) -> None:
    """Routing is real: a domain that is given another's teacher unlearns its own skill."""
    first, second, third = DOMAINS
    swap = [f"domains.{first}.teacher={second}", f"domains.{second}.teacher={first}"]
    run_mopd(
        arguments(
            tmp_path,
            "swapped",
            *swap,
            "train.steps=12",
            "train.prompts_per_step=24",
            "objective.alpha=0",
            held_out=100,
        ),
        tmp_path / "swapped.log",
    )
    domains = json.loads((tmp_path / "swapped/retention.json").read_text())["domains"]
    for name in (first, second):
        assert domains[name]["teacher"] < 0.2, name
        assert domains[name]["student"] < domains[name]["base"] - 0.15, name
    assert domains[third]["student"] > domains[third]["base"] - 0.1
    kl = json_lines(tmp_path / "swapped/metrics.jsonl")[0]
    assert kl[f"domain/{first}/reverse_kl"] > 3 * kl[f"domain/{third}/reverse_kl"]


def test_c06_a_teacher_equal_to_the_student_moves_nothing(tmp_path: Path) -> None:
    same = [f"teachers.{name}.model=demo/models/base" for name in DOMAINS]
    run_mopd(
        arguments(tmp_path, "same", *same, "train.steps=3", "objective.alpha=0"),
        tmp_path / "same.log",
    )
    for step in json_lines(tmp_path / "same/metrics.jsonl"):
        for domain in DOMAINS:
            assert abs(step[f"domain/{domain}/reverse_kl"]) < 1e-5
            assert abs(step[f"domain/{domain}/advantage_mean"]) < 1e-5
            assert step[f"domain/{domain}/advantage_std"] < 1e-4
        assert step["grad_norm"] < 1e-4
    base = load_file(ROOT / "demo/models/base/model.safetensors")
    now = load_file(tmp_path / "same/student/model.safetensors")
    drift = max(float((now[name] - base[name]).abs().max()) for name in base)
    assert drift < 1e-4, drift
