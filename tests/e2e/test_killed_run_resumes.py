"""C35 on a whole run: kill -9 in the middle of a step, and of a checkpoint that is written beside
it; resumed at another parallel layout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from mopd_process import QUICKSTART, ROOT, SMALL, MopdProcess, json_lines, run_mopd

DOMAIN = "caesar"
SAVED, CUT_OFF, KILLED_AFTER = 4, 8, 9
"""Steps of the checkpoint that is whole, of the next one, which the disk never finishes, and steps
finished before the kill, which falls into a later one."""
SLOW_DISK = f"""
import os, time

fsync = os.fsync

def slow_fsync(descriptor):
    name = os.readlink(f"/proc/self/fd/{{descriptor}}")
    while "step_{CUT_OFF:06d}" in name and name.endswith(".distcp"):
        time.sleep(1)
    fsync(descriptor)

os.fsync = slow_fsync
"""
"""For `sitecustomize`, which every Python process of the run imports first."""


@pytest.fixture
def one_domain(tmp_path: Path) -> Path:
    """The quickstart with one of its domains: one teacher to start."""
    tree = yaml.safe_load((ROOT / QUICKSTART).read_text())
    for part in ("teachers", "domains"):
        tree[part] = {DOMAIN: tree[part][DOMAIN]}
    path = tmp_path / "one_domain.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.timeout(900)
def test_kill_9_in_a_step_then_on_at_another_layout(tmp_path: Path, one_domain: Path) -> None:
    def arguments(*more: str) -> list[str]:
        return [
            "train", str(one_domain), f"run_dir={tmp_path}", "name=run", *SMALL,
            f"domains.{DOMAIN}.held_out=40", f"student.optimizer.warmup_steps={SAVED + 4}",
            # So few prompts that what was right before decides what is drawn next.
            f"domains.{DOMAIN}.prompts.size=120", "train.sampling.order=prioritised",
            f"train.checkpoint_every={SAVED}", "student.checkpoint_format=megatron",
            "student.checkpoint_async=true", *more,
        ]  # fmt: skip

    run_dir = tmp_path / "run"
    metrics = run_dir / "metrics.jsonl"
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "sitecustomize.py").write_text(SLOW_DISK)
    path = os.pathsep.join(filter(None, [str(disk), os.environ.get("PYTHONPATH")]))
    first = MopdProcess(arguments("train.steps=100"), tmp_path / "first.log", {"PYTHONPATH": path})
    try:
        deadline = time.monotonic() + 400
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < KILLED_AFTER:
            assert first.process.poll() is None and time.monotonic() < deadline, first.text()
            time.sleep(0.02)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(60)
        # Nobody tells ranks, engine, servers and Ray; each has to notice.
        deadline = time.monotonic() + 120
        while first.left_over() and time.monotonic() < deadline:
            time.sleep(0.5)
        assert first.left_over() == []
    finally:
        first.end()
    killed = tmp_path / "killed"
    shutil.copytree(run_dir, killed)
    cut_off = f"step_{CUT_OFF:06d}"
    assert {p.name for p in (killed / "checkpoints").iterdir()} == {
        f"step_{SAVED:06d}",
        f"{cut_off}.partial",
    }
    assert not (killed / f"checkpoints/{cut_off}.partial/student").exists()
    assert list((killed / f"checkpoints/{cut_off}.partial").rglob("*.distcp"))

    last = SAVED + 4  # the learning rate is still warming up: it is the step's alone
    layout = "student.parallel={dp: 1, tp: 2, ep: 2}"  # it was dp 2, ep 2
    run_mopd(
        arguments(f"train.steps={last}", "resume=true", layout, "train.keep_checkpoints=1"),
        tmp_path / "second.log",
    )

    def step(folder: Path, number: int) -> dict[str, Any]:
        (found,) = (m for m in json_lines(folder / "metrics.jsonl") if m["step"] == number)
        return found

    assert [m["step"] for m in json_lines(metrics)] == list(range(1, last + 1))
    # Training went on while the disk had its time, and said so.
    told = [line.get("checkpoint/writing") for line in json_lines(killed / "metrics.jsonl")]
    assert told[CUT_OFF:] == [CUT_OFF] * len(told[CUT_OFF:]) and len(told) >= KILLED_AFTER
    whole = [m for m in json_lines(killed / "metrics.jsonl") if "checkpoint/write_s" in m]
    assert [m["checkpoint/step"] for m in whole] == [SAVED]
    # Every sample was drawn by the weights that the step before it had made, in both runs.
    for line in json_lines(killed / "metrics.jsonl") + json_lines(metrics):
        assert (line["weight_version"], line["weight_version_lag"]) == (line["step"] - 1, 0)
    # What had been done when it was killed comes out again. Its rollouts are drawn by the same
    # weights to the bit; the student's sums are in another order.
    before, after = step(killed, SAVED + 1), step(run_dir, SAVED + 1)
    exact = ("samples", "tokens", f"domain/{DOMAIN}/reward", f"domain/{DOMAIN}/score", "lr")
    assert {key: after[key] for key in exact} == {key: before[key] for key in exact}
    for key in ("loss", "reverse_kl", "advantage_std", "entropy", "grad_norm"):
        assert after[key] == pytest.approx(before[key], rel=1e-3, abs=1e-5), key
    answers = [
        [
            (line["sample_id"], line["prompt"], line["response"])
            for line in json_lines(folder / "transcripts.jsonl")
            if line["step"] == SAVED + 1
        ]
        for folder in (killed, run_dir)
    ]
    assert answers[0] == answers[1] and answers[0]
    # The prompts went on where the checkpoint was: none twice, none left out; what is known of
    # each, too.
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step_{last:06d}"]
    state = json.loads((run_dir / f"checkpoints/step_{last:06d}/state.json").read_text())
    domain = state["prompts"]["domains"][DOMAIN]
    per_step, per_prompt = (int(each.rpartition("=")[2]) for each in SMALL[:2])
    assert domain["drawn"] == last * per_step
    samples = per_step * per_prompt
    right = [line[f"domain/{DOMAIN}/reward"] * samples for line in json_lines(metrics)]
    counts = domain["history"]["counts"]  # of each prompt: its place, right answers, all answers
    assert sum(judged for _, _, judged in counts) == last * samples
    assert sum(passed for _, passed, _ in counts) == pytest.approx(sum(right), abs=1e-6)
