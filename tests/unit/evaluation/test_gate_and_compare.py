"""The gate's exit code and the comparison of two runs."""

from __future__ import annotations

import json
from statistics import stdev

import pytest
from fake_run import write_fake_run

from mopd.cli import main
from mopd.errors import ConfigError, DataError
from mopd.evaluation.compare import compare_runs, student_scores
from mopd.evaluation.gate import Gate, check_gate, parse_gate
from mopd.evaluation.items import ItemResult
from mopd.evaluation.retention import build_retention
from mopd.evaluation.seeds import over_seeds


def items(right: int, n: int = 200) -> list[ItemResult]:
    return [ItemResult(f"i/{k:03d}", k < right, float(k < right), 3, "stop") for k in range(n)]


def result(student: int, general: int = 120) -> dict:
    roles = {
        "base": {"d": items(100), "general": items(120)},
        "teacher": {"d": items(190)},
        "student": {"d": items(student), "general": items(general)},
    }
    return build_retention(roles, replicates=400, without_teacher=["general"])


def test_the_lower_bound_decides_unless_told_otherwise():
    found = result(188)
    point = found["domains"]["d"]["retention"]
    assert point > 0.98 > found["domains"]["d"]["retention_lower"]
    failed, _ = check_gate(found, parse_gate("min_retention=0.98"))
    assert len(failed) == 1 and failed[0].startswith("d: retention 0.9")
    failed, held = check_gate(found, parse_gate("min_retention=0.98, bound=point"))
    assert failed == [] and len(held) == 1


def test_forgetting_is_looked_for_on_every_set_and_needs_enough_items():
    failed, held = check_gate(result(188, general=112), Gate(max_forgetting=0.03))
    assert [line.split(":")[0] for line in failed] == ["general"]
    assert [line.split(":")[0] for line in held] == ["d"]
    # Not one item differs, but 200 items cannot show that less than 1 % was forgotten.
    unchanged = result(188, general=120)
    assert check_gate(unchanged, Gate(max_forgetting=0.01))[0] != []
    assert check_gate(unchanged, Gate(max_forgetting=0.02))[0] == []


def test_what_cannot_be_measured_is_not_shown():
    roles = {r: {"d": items(150)} for r in ("base", "teacher", "student")}
    found = build_retention(roles, replicates=200)
    (line,) = check_gate(found, Gate(min_headroom=0.5))[0]
    assert "d: headroom captured cannot be shown: teacher - base = +0.000" in line


def test_nothing_and_no_number_show_nothing():
    found = result(188)
    assert check_gate({**found, "domains": {}}, Gate(min_retention=0.9))[0] != []
    for wrong in ({"retention_lower": float("nan")}, {"retention_lower": "high"}):
        broken = {"d": found["domains"]["d"] | wrong}
        with pytest.raises(DataError, match="d: retention_lower is"):
            check_gate({**found, "domains": broken}, Gate(min_retention=0.9))
    short = {k: v for k, v in found["domains"]["d"].items() if k != "headroom_lower"}
    with pytest.raises(DataError, match="headroom_lower is missing"):
        check_gate({**found, "domains": {"d": short}}, Gate(min_headroom=0.9))


def test_headroom_is_judged_as_carefully_as_retention():
    found = result(190)  # the teacher's own answers, on 200 items
    assert check_gate(found, Gate(min_headroom=1.0))[0] != []
    assert check_gate(found, Gate(min_headroom=0.95))[0] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min_retention=0.9,min_retention=0.99", "given twice"),
        ("min_retenton=0.9", "did you mean 'min_retention'"),
        ("min_retention=high", "expected a number"),
        ("min_retention=97", "fractions"),
        ("bound=upper", "lower or point"),
        ("bound=point", "asks for nothing"),
        ("", "asks for nothing"),
    ],
)
def test_a_gate_that_means_nothing_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_gate(text)


def test_the_command_exits_with_1_and_names_the_domains(tmp_path, capsys):
    run = write_fake_run(tmp_path / "run")
    assert main(["report", str(run), "--gate", "min_retention=0.5"]) == 0
    assert main(["report", str(run), "--gate", "min_retention=0.999"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "caesar: retention" in out
    unfinished = write_fake_run(tmp_path / "unfinished", done=20)
    assert main(["report", str(unfinished), "--gate", "min_retention=0.5"]) == 1
    assert "retention.json" in capsys.readouterr().err


def write_answers(run, right: set[int], n: int = 100):
    run.mkdir(parents=True, exist_ok=True)
    rows = [[f"i/{k}", k in right, 1.0, 3] for k in range(n)]
    (run / "final_answers.json").write_text(json.dumps({"student": {"d": rows}}))
    (run / "config.yaml").write_text(f"seed: {len(right)}\ntrain: {{steps: 5}}\n")


def test_runs_are_compared_on_common_items(tmp_path, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    write_answers(a, set(range(60)))
    write_answers(b, set(range(10, 90)), n=110)
    rows, different = compare_runs(a, b)
    (row,) = rows
    assert (row.a, row.b, row.n, row.left_out) == (0.6, 0.8, 100, 10)
    assert (row.better, row.worse) == (30, 10) and 0.001 < row.p < 0.01
    assert row.change_ci95[0] > 0.05
    assert different == ["seed: 60 -> 80"]
    assert main(["report", "--compare", str(a), str(b)]) == 0
    assert "+0.200" in capsys.readouterr().out


def test_runs_that_share_nothing_are_refused(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    write_answers(a, {1})
    b.mkdir()
    with pytest.raises(DataError, match="neither final_answers.json nor"):
        student_scores(b)
    (b / "final_answers.json").write_text(json.dumps({"student": {"other": [["x", True, 1, 1]]}}))
    with pytest.raises(DataError, match="no judged held-out item in common"):
        compare_runs(a, b)


@pytest.mark.parametrize("row", [["i/1"], ["i/1", "yes", 1.0, 3], [1, True, 1.0, 3]])
def test_damaged_answers_are_named(tmp_path, row):
    run = write_fake_run(tmp_path / "r", steps=25)
    (run / "final_answers.json").write_text(json.dumps({"student": {"sum": [row]}}))
    with pytest.raises(DataError, match=r"final_answers.json is damaged .*\$\[...\]\[...\]"):
        student_scores(run)


def test_a_run_without_a_configuration_is_said_to_have_none(tmp_path):
    a, b = write_fake_run(tmp_path / "a", steps=25), write_fake_run(tmp_path / "b", steps=25)
    (b / "config.yaml").rename(b / "evaluation.yaml")  # of an evaluation alone
    assert compare_runs(a, b)[1] == []
    (b / "evaluation.yaml").unlink()
    (line,) = compare_runs(a, b)[1]
    assert str(b) in line and "not compared" in line


def test_the_last_recorded_answers_do_where_there_is_no_final_file(tmp_path):
    folder = tmp_path / "answers"
    folder.mkdir()
    for step, right in ((0, False), (20, True)):
        record = {"d": [{"item_id": "i/0", "correct": right}]}
        (folder / f"student-{step:06d}.json").write_text(json.dumps(record))
    assert student_scores(tmp_path) == {"d": {"i/0": True}}


def test_seeds_are_averaged_and_other_differences_told(tmp_path, capsys):
    runs = [write_fake_run(tmp_path / f"seed{k}", steps=30 + k // 2) for k in range(3)]
    rows, different = over_seeds(runs)
    students = [
        json.loads((r / "retention.json").read_text())["domains"]["sum"]["student"] for r in runs
    ]
    assert rows["sum"]["student"]["mean"] == pytest.approx(sum(students) / 3)
    assert rows["sum"]["student"]["sd"] == pytest.approx(stdev(students))
    assert different == ["seed2 differs from seed0 in train.steps: 30 -> 31"]
    assert main(["report", "--seeds", *map(str, runs)]) == 0
    assert "0.000" in capsys.readouterr().out
    with pytest.raises(DataError, match="two runs or more"):
        over_seeds(runs[:1])
