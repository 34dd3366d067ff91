"""Teachers that die, come and go while a whole run goes on: kill -9, `mopd teachers add|remove`
(C12)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mopd_process import MARK, QUICKSTART, ROOT, SMALL, MopdProcess, json_lines, run_mopd

from mopd.build import prepare
from mopd.cli import main
from mopd.config.load import load_config

DOMAIN = "caesar"
STEPS, PROMPTS = 8, int(SMALL[0].rpartition("=")[2])


VERIFIER = """
import time
from pathlib import Path

def judge(prompt, answer, logs):
    # A step ends when there is something to take up for the next one, or nothing more to come.
    asked, done, wanted = (
        Path(logs, name) for name in ("teacher-requests", "teacher-changes.jsonl", "wanted")
    )
    while wanted.exists() and not any(asked.glob("*.json")):
        told = done.read_text().splitlines() if done.exists() else []
        if len(told) >= int(wanted.read_text()):
            break
        time.sleep(0.1)
    return answer.strip() == prompt.answer
"""


def teachers_of(run_dir: Path) -> dict[str, Any]:
    """What the run says of its teachers, by name."""
    rows = json.loads((run_dir / "logs/teachers.json").read_text())["teachers"]
    return {row["name"]: row for row in rows}


def servers_in(run_dir: Path) -> list[dict[str, Any]]:
    return list(teachers_of(run_dir)[DOMAIN]["servers"])


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return json_lines(path) if path.exists() else []


def one_domain(tmp_path: Path, verifier: dict[str, Any] | None = None, **teacher: Any) -> Path:
    """The quickstart's configuration with this domain and its teacher alone."""
    tree = yaml.safe_load((ROOT / QUICKSTART).read_text())
    for part in ("teachers", "domains"):
        tree[part] = {DOMAIN: tree[part][DOMAIN]}
    tree["teachers"][DOMAIN] |= teacher
    if verifier is not None:
        tree["domains"][DOMAIN]["verifier"] = verifier
    config = tmp_path / "one_domain.yaml"
    config.write_text(yaml.safe_dump(tree))
    return config


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
def test_kill_9_of_a_teacher_one_more_server_of_it_and_another_teacher_for_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only server is killed: the step in hand waits for its restart. The second one that was
    asked for joins at a later step. A whole teacher that is added (where that second server is)
    scores the domain in one step, at whose beginning its removal is taken up."""
    run_dir = tmp_path / "run"
    (tmp_path / "waiting_verifier.py").write_text(VERIFIER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    verifier = {
        "target": "waiting_verifier:judge", "args": {"logs": str(run_dir / "logs")},
        "timeout_s": 200.0,
    }  # fmt: skip
    config = one_domain(tmp_path, verifier)
    overrides = [
        f"run_dir={tmp_path}", "name=run", *SMALL, f"train.steps={STEPS}",
        f"domains.{DOMAIN}.held_out=40", f"train.checkpoint_every={STEPS}",
    ]  # fmt: skip

    def metrics() -> list[dict[str, Any]]:
        return metrics_of(run_dir)

    run = MopdProcess(["train", str(config), *overrides], tmp_path / "log")
    try:
        run.wait_until(lambda: len(metrics()) >= 2, 400)
        (run_dir / "logs/wanted").write_text("3")
        assert main(["teachers", "add", str(run_dir), DOMAIN]) == 0
        os.kill(server_of(run), signal.SIGKILL)
        run.wait_until(lambda: len(servers_in(run_dir)) == 2, 200)
        new = servers_in(run_dir)[1]
        where = ["--endpoint", new["url"], "--model", new["model"]]
        assert main(["teachers", "add", str(run_dir), "tuned", "--domain", DOMAIN, *where]) == 0
        run.wait_until(lambda: "tuned" in teachers_of(run_dir), 100)
        assert main(["teachers", "remove", str(run_dir), "tuned"]) == 0
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
    changes = json_lines(run_dir / "logs/teacher-changes.jsonl")
    assert [change["op"] for change in changes] == ["add", "add", "remove"]
    for change, says in zip(changes, (f"serves {DOMAIN}, too", f"tuned scores {DOMAIN} from the",
                                      "tuned scores nothing from the"), strict=True):  # fmt: skip
        assert says in change["outcome"]
    # Every step was scored by one of the two teachers, the new one's by it alone.
    own = [step[f"teacher/{DOMAIN}/tokens"] for step in steps]
    scored = [later > before for before, later in zip([0.0, *own], own, strict=False)]
    theirs = [step.get("teacher/tuned/tokens", 0.0) for step in steps]
    assert [not tokens for tokens in theirs] == scored and scored.count(False) == 1
    assert scored[-1] and "teacher/tuned/tokens" not in last
    (row,) = json.loads((run_dir / "logs/teachers.json").read_text())["teachers"]
    assert [server["ours"] for server in row["servers"]] == [True, True]
    assert row["servers"][1]["tokens_per_s"], "it was asked for scores"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_past_the_budget_the_run_ends_with_a_checkpoint_and_goes_on_from_it(tmp_path: Path) -> None:
    """No restart, no pause: the step that is under way when the server dies loses its samples. What
    was trained before it is kept, though no checkpoint was due, and no prompt is lost."""
    run_dir, steps = tmp_path / "run", 400
    config = one_domain(tmp_path, max_restarts=0, pause_s=0.0, retries=0)

    def command(steps: int, *more: str) -> list[str]:
        return [
            "train", str(config), f"run_dir={tmp_path}", "name=run", *SMALL, *more,
            f"domains.{DOMAIN}.held_out=40", f"train.steps={steps}", "train.checkpoint_every=1000",
            "student.optimizer.schedule=constant", "train.keep_checkpoints=2",
        ]  # fmt: skip

    run = MopdProcess(command(steps), tmp_path / "first.log")
    try:
        run.wait_until(lambda: len(metrics_of(run_dir)) >= 2, 400)
        os.kill(server_of(run), signal.SIGKILL)
        assert run.wait(200) == 1, run.text()
        assert run.left_over() == []
    finally:
        run.end()
    done = len(metrics_of(run_dir))
    assert "failures.max_masked_fraction" in run.text() and "x teacher: " in run.text()
    assert f"saved after step {done}; resume=true goes on from there" in run.text()
    (saved,) = (run_dir / "checkpoints").iterdir()
    assert saved.name == f"step_{done:06d}"
    state = json.loads((saved / "state.json").read_text())
    assert state["prompts"]["domains"][DOMAIN]["drawn"] == done * PROMPTS

    run_mopd(command(done + 2, "resume=true"), tmp_path / "second.log")
    assert [step["step"] for step in metrics_of(run_dir)] == list(range(1, done + 3))
    state = json.loads((run_dir / f"checkpoints/step_{done + 2:06d}/state.json").read_text())
    assert state["prompts"]["domains"][DOMAIN]["drawn"] == (done + 2) * PROMPTS
