"""Teachers that die and come while a whole run goes on: kill -9 and `mopd teachers add` (C12)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mopd_process import MARK, QUICKSTART, ROOT, SMALL, MopdProcess, json_lines

from mopd.build import prepare
from mopd.cli import main
from mopd.config.load import load_config

DOMAIN = "caesar"
STEPS, PROMPTS = 8, int(SMALL[0].rpartition("=")[2])


VERIFIER = """
import time
from pathlib import Path

def judge(prompt, answer, logs):
    # Once the run has begun to start the second server, its steps wait for that one.
    asked, done = Path(logs, "teacher-requests"), Path(logs, "teacher-changes.jsonl")
    while asked.is_dir() and not any(asked.glob("*.json")) and not done.exists():
        time.sleep(0.1)
    return answer.strip() == prompt.answer
"""


def server_of(run: MopdProcess) -> int:
    """The one teacher server of this run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == run.mark and (
                "mopd_teachers.serve" in process.cmdline()
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    (leader,) = [p for p in found if p.pid == os.getpgid(p.pid)]
    return leader.pid


@pytest.mark.timeout(600)
def test_kill_9_of_a_teacher_and_one_more_server_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only server is killed: the step in hand waits for its restart. The second one that was
    asked for joins at a later step."""
    run_dir = tmp_path / "run"
    (tmp_path / "waiting_verifier.py").write_text(VERIFIER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = yaml.safe_load((ROOT / QUICKSTART).read_text())
    for part in ("teachers", "domains"):
        tree[part] = {DOMAIN: tree[part][DOMAIN]}
    tree["domains"][DOMAIN]["verifier"] = {
        "target": "waiting_verifier:judge", "args": {"logs": str(run_dir / "logs")},
        "timeout_s": 200.0,
    }  # fmt: skip
    config = tmp_path / "one_domain.yaml"
    config.write_text(yaml.safe_dump(tree))
    overrides = [
        f"run_dir={tmp_path}", "name=run", *SMALL, f"train.steps={STEPS}",
        f"domains.{DOMAIN}.held_out=40", f"train.checkpoint_every={STEPS}",
    ]  # fmt: skip

    def metrics() -> list[dict[str, Any]]:
        path = run_dir / "metrics.jsonl"
        return json_lines(path) if path.exists() else []

    run = MopdProcess(["train", str(config), *overrides], tmp_path / "log")
    try:
        run.wait_until(lambda: len(metrics()) >= 2, 400)
        assert main(["teachers", "add", str(run_dir), DOMAIN]) == 0
        os.kill(server_of(run), signal.SIGKILL)
        assert run.wait(400) == 0, run.text()
        assert run.left_over() == []
    finally:
        run.end()

    steps = metrics()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    # Nothing was lost: every step trained on all of its samples.
    assert all(step["samples"] == 2 * PROMPTS and step["failures/fraction"] == 0 for step in steps)
    # The prompts are those of a run to which nothing happened: the same draws, and no others.
    prepared = prepare(load_config([config], overrides))
    mixture = prepared.mixture()
    undisturbed = [[prompt.id for prompt in mixture.draw(PROMPTS)] for _ in range(STEPS)]
    state = json.loads((run_dir / f"checkpoints/step_{STEPS:06d}/state.json").read_text())
    assert state["prompts"]["domains"][DOMAIN]["drawn"] == STEPS * PROMPTS
    for line in json_lines(run_dir / "transcripts.jsonl"):
        assert line["sample_id"].split(":")[2] in undisturbed[line["step"] - 1]
    # The server was started again, and the second one takes its share and is recorded.
    last = steps[-1]
    assert last[f"teacher/{DOMAIN}/restarts"] == 1
    assert last[f"teacher/{DOMAIN}/servers"] == last[f"teacher/{DOMAIN}/servers_up"] == 2
    assert steps[1][f"teacher/{DOMAIN}/servers"] == 1
    (change,) = json_lines(run_dir / "logs/teacher-changes.jsonl")
    assert change["op"] == "add" and f"serves {DOMAIN}, too" in change["outcome"]
    (row,) = json.loads((run_dir / "logs/teachers.json").read_text())["teachers"]
    assert [server["ours"] for server in row["servers"]] == [True, True]
    assert row["servers"][1]["tokens_per_s"], "it was asked for scores"
