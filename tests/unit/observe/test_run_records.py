"""metrics.jsonl, evaluations.jsonl, TensorBoard scalars, transcripts.jsonl, versions.json."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from mopd.errors import MopdError
from mopd.observe.metrics import MetricsWriter
from mopd.observe.transcripts import TranscriptWriter
from mopd.observe.versions import write_versions


def lines(path: Path) -> list[dict]:
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def scalars(run_dir: Path) -> list[tuple[str, int, float]]:
    """Read the event files' records themselves: u64 length, u32 crc, event, u32 crc."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((run_dir / "tensorboard").glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 12 + size + 4
    return found


def test_metrics_are_on_disk_after_each_step_and_on_tensorboard(tmp_path: Path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": np.float32(0.5), "domain/spell/reward": 1, "lr": None})
        assert lines(tmp_path / "metrics.jsonl")[0]["loss"] == 0.5  # before any close
        writer.write_evaluation(0, "base", "spell", correct=0.5, score=0.75, n=200)
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert record["step"] == 1 and record["time_s"] >= 0 and record["lr"] is None
    (evaluation,) = lines(tmp_path / "evaluations.jsonl")
    assert {k: evaluation[k] for k in ("step", "who", "domain", "correct", "score", "n")} == {
        "step": 0, "who": "base", "domain": "spell", "correct": 0.5, "score": 0.75, "n": 200
    }  # fmt: skip
    assert ("loss", 1, 0.5) in scalars(tmp_path)
    assert ("domain/spell/reward", 1, 1.0) in scalars(tmp_path)
    assert ("evaluation/spell/base/score", 0, 0.75) in scalars(tmp_path)


def test_not_finite_is_null_and_told_once_a_name(tmp_path: Path):
    told: list[str] = []
    with MetricsWriter(tmp_path, warn=told.append) as writer:
        for step in (1, 2):
            writer.write(step, {"loss": math.nan, "norm": -math.inf, "ok": 1.0})
    for record in lines(tmp_path / "metrics.jsonl"):
        assert record["loss"] is None and record["norm"] is None and record["ok"] == 1.0
    assert len(told) == 2 and "loss" in told[0] and "norm" in told[1]
    assert {tag for tag, _, _ in scalars(tmp_path)} == {"ok"}


def test_resume_drops_later_steps_and_a_torn_line(tmp_path: Path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": float(step)})
            writer.write_evaluation(step, "student", "spell", correct=0.5, score=0.5, n=9)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed here
    with MetricsWriter(tmp_path, resume_step=2, tensorboard=False) as writer:
        writer.write(3, {"loss": 30.0})
    got = lines(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["loss"]) for r in got] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [r["step"] for r in lines(tmp_path / "evaluations.jsonl")] == [1, 2]
    assert [r["time_s"] for r in got] == sorted(r["time_s"] for r in got)
    assert not list(tmp_path.glob("*.partial"))


def test_time_goes_on_over_a_resume(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "time_s": 1000.0}\n')
    with MetricsWriter(tmp_path, resume_step=5, tensorboard=False) as writer:
        writer.write(6, {})
    assert 1000.0 <= lines(tmp_path / "metrics.jsonl")[1]["time_s"] < 1010.0


def test_another_runs_file_is_not_mixed_in(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(MopdError, match="resume=true"):
        MetricsWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_foreign_line_stops_the_resume_and_is_named(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(MopdError, match="line 2"):
        MetricsWriter(tmp_path, resume_step=2)


def test_metric_may_not_shadow_the_step(tmp_path: Path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer, pytest.raises(AssertionError):
        writer.write(1, {"step": 3.0})


def test_transcripts_are_bounded_per_step_and_domain(tmp_path: Path):
    def write(writer, step, domain, k):
        return writer.write(
            step, domain, f"{step}:{domain}/{k}:0", prompt="<b>", response="é\u2028\udc80",
            correct=True, tokens=["é", "x"], teacher_minus_student=[0.1, math.nan],
        )  # fmt: skip

    with TranscriptWriter(tmp_path, per_domain=2, every=5) as writer:
        kept = [write(writer, s, d, k) for s in (4, 5, 10) for k in range(3) for d in ("a", "b")]
        assert not writer.wants(10, "a") and writer.wants(15, "a") and writer.wants(10, "c")
    got = lines_by_newline(tmp_path / "transcripts.jsonl")
    assert sum(kept) == len(got) == 8
    assert {r["step"] for r in got} == {5, 10}
    assert got[0]["teacher_minus_student"] == [0.1, None] and got[0]["response"] == "é\u2028\udc80"
    with TranscriptWriter(tmp_path, resume_step=5) as writer:
        pass
    assert {r["step"] for r in lines_by_newline(tmp_path / "transcripts.jsonl")} == {5}


def lines_by_newline(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_resume_reads_a_line_that_holds_a_line_separator(tmp_path: Path):
    (tmp_path / "transcripts.jsonl").write_text('{"step": 1, "response": "a\u2028b"}\n')
    TranscriptWriter(tmp_path, resume_step=1).close()
    (record,) = lines_by_newline(tmp_path / "transcripts.jsonl")
    assert record["response"] == "a\u2028b"


def test_transcript_with_unequal_lengths_is_refused(tmp_path: Path):
    with TranscriptWriter(tmp_path) as writer, pytest.raises(ValueError, match="2 tokens but 1"):
        writer.write(
            1,
            "a",
            "1:a/0:0",
            prompt="",
            response="",
            correct=None,
            tokens=["a", "b"],
            teacher_minus_student=[0.0],
        )


def test_versions_name_what_is_installed(tmp_path: Path):
    got = json.loads(write_versions(tmp_path).read_text())
    assert got["numpy"] == np.__version__ and got["python"].startswith("3.")
