"""`mopd teachers serve|list|probe` with a real server, by the command line alone."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from mopd_teachers import wire
from mopd_teachers.client import Endpoint, TeacherClient
from mopd_teachers.scores import ScoreItem, TeacherScore

ROOT = Path(__file__).parents[2]
NAMES = ("caesar", "other")
CONFIG = """
name: serving
student: {{model: {demo}/base}}
rollout: {{max_response_tokens: 16}}
teachers:
  caesar: {{model: {demo}/teacher_caesar}}
  other: {{endpoints: ["{url}"], model: caesar}}
domains:
  a: {{teacher: caesar, prompts: {{task: spell_backward}}}}
  b: {{teacher: other, prompts: {{task: spell_backward}}}}
train: {{steps: 10, prompts_per_step: 4}}
"""


def command(*arguments: str, cwd: Path) -> list[str]:
    return [sys.executable, "-m", "mopd.cli", "teachers", *arguments]


def test_a_teacher_is_served_probed_and_drained(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(demo=ROOT / "demo/models", url="http://127.0.0.1:9"))
    server = subprocess.Popen(
        command("serve", str(config), "caesar", "--port", "0", cwd=tmp_path),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = ""
        for line in server.stdout:
            if found := re.search(r"caesar is served at (\S+)", line):
                url = found[1]
                break
        assert url, "the server has ended"
        config.write_text(CONFIG.format(demo=ROOT / "demo/models", url=url))

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command(*arguments, cwd=tmp_path), cwd=tmp_path, capture_output=True, text=True
            )

        listed = json.loads(run("list", str(config), "--json").stdout)["teachers"]
        assert {row["name"]: row["domains"] for row in listed} == {"caesar": ["a"], "other": ["b"]}
        assert listed[1]["servers"][0]["state"] == "up, serves caesar"
        probed = run("probe", str(config), "other", "--json")
        findings = json.loads(probed.stdout.splitlines()[-1])
        assert probed.returncode == 0 and findings["good"], findings
        assert "at its own speed" not in findings["teachers"]["other"][0]["detail"]
        assert_checked_live(tmp_path, config)
        asyncio.run(scored_while_it_ends(url, server))
        assert server.wait(60) == 0
    finally:
        if server.poll() is None:
            server.kill()
        server.wait()


def test_a_server_that_still_loads_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """A large model loads for minutes."""
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(demo=ROOT / "demo/models", url="http://127.0.0.1:9"))
    with (tmp_path / "said").open("w") as said:
        server = subprocess.Popen(
            command("serve", str(config), "caesar", "--port", "0", cwd=tmp_path),
            cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        loading: list[psutil.Process] = []
        while not loading:
            assert server.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
            loading = psutil.Process(server.pid).children(recursive=True)
        begin = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 130
        assert time.monotonic() - begin < 15 and "is served" not in (tmp_path / "said").read_text()
        assert not [p for p in loading if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    finally:
        server.kill()
        server.wait()


def assert_checked_live(tmp_path: Path, config: Path) -> None:
    """`mopd check --live`: one teacher started as a run would, the other asked where it is."""
    done = subprocess.run(
        [sys.executable, "-m", "mopd.cli", "check", str(config), "--live", "--json"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["status"] for row in rows} <= {"ok", "warning"}
    asked = {name: {r["what"] for r in rows if r["part"] == f"teacher {name}"} for name in NAMES}
    questions = {
        "identity", "the same twice", "in another order", "alone or in a batch",
        "prompt and response cut elsewhere", "with the beginnings in the prefix cache",
        "not one value for all", "speed",
    }  # fmt: skip
    assert asked["other"] == questions
    assert asked["caesar"] == questions | {"as the checkpoint itself says"}
    # A teacher that is another one than its name says fails its row, and the command.
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(config.read_text().replace("model: caesar}", "model: rotate}"))
    overrides = ["domains.a.teacher=other", "teachers.other.retries=0"]
    done = subprocess.run(
        [sys.executable, "-m", "mopd.cli", "check", str(wrong), *overrides, "--live", "--json"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    (bad,) = [r for r in json.loads(done.stdout)["rows"] if r["status"] == "failed"]
    assert bad["part"] == "teacher other" and "expected 'rotate'" in bad["detail"]


async def scored_while_it_ends(url: str, server: subprocess.Popen[str]) -> None:
    """SIGTERM with half of a batch done, and an answer being written on vLLM's own route: what was
    sent is answered, then it goes."""
    rng = random.Random(0)
    items = [ScoreItem(str(i), [1], [rng.randrange(256) for _ in range(200)]) for i in range(400)]
    async with TeacherClient("caesar", [Endpoint(url, "caesar")], retries=0) as client:
        await client.probe()
        await client.score_batch(items[:60])  # it is warm, and the client knows its speed
        scoring = asyncio.create_task(client.score_batch(items))
        await asyncio.sleep(0.4)
        metrics = await asyncio.to_thread(_read, f"{url}{wire.PATH}/metrics")
        waiting = int(re.search(r"sequences_in_flight (\d+)", metrics)[1])  # type: ignore[index]
        done = int(re.search(r"score_sequences_total (\d+)", metrics)[1])  # type: ignore[index]
        assert waiting > 0 and done >= 60, metrics
        writing = asyncio.create_task(client.generate([[1]] * 16, max_tokens=250))
        await asyncio.sleep(0.2)
        server.send_signal(signal.SIGTERM)
        scores, answers = await scoring, await writing
    assert all(isinstance(score, TeacherScore) for score in scores.values())
    assert all(answer.finish_reason in ("stop", "length") for answer in answers)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())
