"""`mopd evaluate` with real engines on the demo's models: one domain, a student that is a copy of
its teacher, a general set, and the cache."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mopd.build import Prepared, prepare
from mopd.config.load import load_config
from mopd.evaluating.run import run_evaluation
from mopd.observe.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
ITEMS = 60


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("evaluate")
    rows = [{"prompt": f"back {w}:", "answer": w[::-1]} for w in ("marble", "window", "rocket")]
    (folder / "general.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "more.yaml").write_text(
        "evaluation:\n  samples: 2\n  pass_at: [2]\n  bootstrap: 200\n  general:\n    common:\n"
        f"      {{prompts: {folder}/general.jsonl, verifier: exact_match}}\n"
    )
    text = (ROOT / "configs/quickstart.yaml").read_text()
    start, end = text.index("  rotate:\n    teacher"), text.index("objective:")
    (folder / "one.yaml").write_text(text[:start] + text[end:])  # the domain `backward` alone
    overrides = [f"run_dir={folder}/runs", "name=eval", f"domains.backward.held_out={ITEMS}"]
    return prepare(load_config([folder / "one.yaml", folder / "more.yaml"], overrides))


def evaluate(prepared: Prepared, student: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(evaluation.json, retention.json, what was said)."""
    said = io.StringIO()
    with Progress(1, [], plain=True, file=said) as progress:
        out = Path(prepared.config.run_dir) / "out"
        outcome = run_evaluation(prepared, progress, out, student=student)
    assert outcome.retention is not None
    return dict(outcome.record), dict(outcome.retention), said.getvalue()


def test_a_copy_of_the_teacher_keeps_all_and_a_second_report_costs_nothing(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(prepared.config.run_dir) / "copy"
    shutil.copytree(ROOT / "demo/models/teacher_backward", copy)
    record, retention, _ = evaluate(prepared, str(copy))
    entry = retention["domains"]["backward"]
    assert entry["retention"] == 1.0 and entry["headroom_captured"] == 1.0
    assert entry["tests"]["student_against_teacher"]["p"] == 1.0
    assert entry["tests"]["student_against_base"]["p"] < 1e-3
    assert retention["forgetting"]["common"]["n"] == 3
    # The same weights score the same tokens, once while sampling and once as a prompt.
    assert abs(record["divergence"]["backward"]["k1"]) < 1e-3
    table = record["table"]
    assert table["student"]["backward"] == table["teacher backward"]["backward"]
    assert set(table["base"]) == {"backward", "common"}
    assert record["sampled"]["student"]["backward"]["pass"]["2"]["value"] >= 0.9
    assert 0 < record["cost"]["engine_share"] <= 1  # what it is depends on who else computes
    samples = (Path(prepared.config.run_dir) / "out" / "samples.jsonl").read_text().splitlines()
    first = json.loads(samples[0])
    assert len(first["tokens"]) == len(first["teacher_minus_student"]) > 0
    assert max(map(abs, first["teacher_minus_student"])) < 1e-2

    # Nothing may be started now: an engine or Ray would fail here.
    monkeypatch.setattr("mopd.evaluating.answers.ray_cluster", None)
    again, kept, said = evaluate(prepared, str(copy))
    assert "every answer is in the cache" in said
    assert kept == retention and again["table"] == table
    earlier = dict(record["cost"])  # of when the answers were asked for
    assert earlier.pop("earlier") == [] and earlier["answers_asked"] > 0
    assert again["cost"]["earlier"] == [earlier] and again["cost"]["answers_asked"] == 0
    saved = load_config([Path(prepared.config.run_dir) / "out" / "evaluation.yaml"])
    assert saved == prepared.config
