"""Further models against the student: the lead over all domains, tokens behind it, other seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from fake_run import DOMAINS, write_fake_run

from mopd.evaluation.against import against_student
from mopd.evaluation.items import ItemResult
from mopd.evaluation.report import verdict, write_report
from mopd.evaluation.report_methods import method_rows, seeds
from mopd.evaluation.run_files import read_run
from mopd.evaluation.significance import mcnemar
from mopd.evaluation.trained import recipe_differences, run_of, training_of


def items(name: str, right: str) -> list[ItemResult]:
    """``"10-"``: right, wrong, not judged."""
    values = {"1": True, "0": False, "-": None}
    return [
        ItemResult(f"{name}/{k}", values[c], None if c == "-" else float(c), 3, "stop")
        for k, c in enumerate(right)
    ]


def test_the_lead_is_of_the_mean_over_domains_and_its_test_weighs_them_alike() -> None:
    own = {"a": items("a", "1110"), "b": items("b", "10")}
    student = {"a": items("a", "1000"), "b": items("b", "11")}
    by_domain, lead = against_student(
        own, student, {"a": ["a"], "b": ["b"]}, replicates=4000, seed=0
    )
    assert by_domain["a"] == {"p": mcnemar(2, 0), "test": "McNemar", "better": 2, "worse": 0}
    assert lead is not None and lead["value"] == (0.5 - 0.5) / 2
    assert (lead["better"], lead["worse"], lead["test"]) == (2, 1, "permutation")
    # Signs of differences of weight 1/4, 1/4 and 1/2: |sum| is at least |0| always.
    assert lead["p"] == 1.0
    # Resampling a: 2 of 4 items differ by 1, b: 1 of 2 by -1; the mean ranges over [-1/2, 1/2].
    assert lead["ci95"][0] < 0 < lead["ci95"][1] <= 0.5


def test_equal_domains_are_mcnemars_and_the_unjudged_are_left_out() -> None:
    own = {"a": items("a", "1111-"), "b": items("b", "11110")}
    student = {"a": items("a", "00001"), "b": items("b", "0000-")}
    _, lead = against_student(own, student, {"a": ["a"], "b": ["b"]}, replicates=10, seed=0)
    assert lead is not None and lead["value"] == 1.0 and lead["ci95"] == [1.0, 1.0]
    assert lead["test"] == "McNemar" and lead["p"] == pytest.approx(2 / 2**8)


def test_no_lead_over_domains_that_were_not_answered() -> None:
    own = {"a": items("a", "11")}
    student = {"a": items("a", "01"), "b": items("b", "1")}
    by_domain, lead = against_student(own, student, {"a": ["a"], "b": ["b"]}, replicates=10, seed=0)
    assert set(by_domain) == {"a"} and lead is None


# --- runs behind folders ---


def a_run(place: Path, **config: object) -> Path:
    run = write_fake_run(place, steps=50, done=40)
    stored = yaml.safe_load((run / "config.yaml").read_text()) | config
    (run / "config.yaml").write_text(yaml.safe_dump(stored))
    (run / "student").mkdir()
    return run


def test_what_training_took_is_read_from_the_run_around_the_checkpoint(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    found = training_of(run / "student", None)
    assert found is not None
    assert (found["steps"], found["seed"], found["differs"]) == (40, 3, None)
    assert found["tokens"] == 40 * 1500 and found["samples"] == 40 * 192
    (run / "best" / "student").mkdir(parents=True)
    (run / "best.json").write_text(json.dumps({"step": 25, "value": 0.9}))
    best = training_of(run / "best" / "student", None)
    assert best is not None and best["tokens"] == 25 * 1500
    assert training_of(tmp_path / "elsewhere" / "student", None) is None
    assert training_of(run / "baselines" / "weight_average", None) is None
    assert training_of(run / "merged", None) is None
    assert run_of(run / "student") == run == run_of(run / "best" / "student")


def test_seeds_and_evaluation_are_no_other_recipe_but_an_objective_is(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one")
    two = a_run(tmp_path / "two", seed=4, name="two", evaluation={"every": 0})
    other = a_run(tmp_path / "other", objective={"teacher": {"weight": 0.0}})
    assert recipe_differences(one, two) == []
    assert [d.partition(":")[0] for d in recipe_differences(one, other)] == [
        "objective.teacher.weight"
    ]


def evaluated(place: Path) -> Path:
    """A run with a further model of another recipe, a merge, and two of other seeds."""
    run = write_fake_run(place)
    record = json.loads((run / "evaluation.json").read_text())
    merged = record["others"]["average"]
    captured = {d: 0.9 for d in DOMAINS}
    for name, mean in (("two", 0.94), ("three", 0.92), ("sft", 0.97)):
        record["others"][name] = {
            **merged,
            "headroom_captured": captured,
            "mean_headroom_captured": mean,
            "mean": mean,
            "lead": {"value": 0.01, "ci95": [-0.01, 0.03], "p": 0.4, "better": 5, "worse": 3},
        }
        record["router"]["models"][name] = mean
    training = {"steps": 150, "samples": 9.0, "tokens": 225000.0, "step_seconds": 310.0}
    record["models"] = {
        "student": {"training": {**training, "seed": 3, "differs": []}},
        "two": {"training": {**training, "seed": 1, "differs": []}},
        "three": {"training": {**training, "seed": 2, "differs": []}},
        "sft": {"training": {**training, "seed": 3, "differs": ["rollout.source: a -> b"]}},
        "average": {},
    }
    (run / "evaluation.json").write_text(json.dumps(record))
    return run


def test_the_report_sets_simpler_ways_apart_from_other_seeds(tmp_path: Path) -> None:
    place = evaluated(tmp_path / "r")
    run = read_run(place)
    rows = {row[0]: row for row in method_rows(run)}
    assert list(rows) == ["student", "average", "sft"]
    assert rows["sft"][1] == "0.970"
    assert rows["sft"][3:] == ("+0.010 [-0.010, +0.030]", "0.4", "5 / 3", "225,000", "310")
    assert rows["average"][-2:] == ("–", "–")
    columns, found = seeds(run)
    assert columns == ("seed", *DOMAINS, "mean")
    assert [row[0] for row in found] == ["3", "1", "2", "mean", "sd"]
    own = json.loads((place / "retention.json").read_text())["mean_headroom_captured"]
    assert found[-2][-1] == f"{(own + 0.94 + 0.92) / 3:.3f}"
    said = verdict(run)
    assert "Ahead of it is sft (0.970, by +0.010 [-0.010, +0.030], which may be chance)." in said
    assert "two (" not in said and "Over 3 seeds" in said
    html = write_report(place).read_text()
    assert "Was it worth it?" in html and "Other seeds of this recipe" in html
    assert "| sft | 0.970 |" in (place / "report.md").read_text()


@pytest.mark.parametrize("steps", [149, None])
def test_a_run_that_is_not_as_long_is_no_other_seed(tmp_path: Path, steps: int | None) -> None:
    place = evaluated(tmp_path / "r")
    record = json.loads((place / "evaluation.json").read_text())
    for name in ("two", "three"):
        record["models"][name]["training"]["steps"] = steps
    (place / "evaluation.json").write_text(json.dumps(record))
    run = read_run(place)
    assert seeds(run)[1] == [] and len(method_rows(run)) == 5
