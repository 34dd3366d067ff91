"""Retention metrics: the published check values, the bootstrap, and what must be refused."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mopd.errors import DataError
from mopd.evaluation.items import ItemResult
from mopd.evaluation.metrics import (
    forgetting,
    headroom_captured,
    interval,
    mean_headroom_captured,
    paired_bootstrap,
    recovery,
    retention,
)
from mopd.evaluation.retention import build_retention, write_retention
from mopd.evaluation.tables import retention_markdown, retention_table

BENCHMARKS = ("AIME25", "AIME26", "IFBench", "IFEval", "SWE-V")
DOMAINS = {"math": ["AIME25", "AIME26"], "if": ["IFBench", "IFEval"], "code": ["SWE-V"]}


def items(right, total=None, *, prefix="d", score=None, tokens=10, finish="stop"):
    """`right`: a count of right answers (the first ones), or a list of bools."""
    flags = [k < right for k in range(total)] if total is not None else list(right)
    return [
        ItemResult(f"{prefix}/{k}", f, float(f) if score is None else score, tokens, finish)
        for k, f in enumerate(flags)
    ]


def one_domain(base, teacher, student, **kw):
    roles = {"base": base, "teacher": teacher, "student": student}
    return build_retention({r: {"spell": v} for r, v in roles.items()}, **kw)


# --- published values ---


def row(*scores):
    """A domain's benchmarks are averaged first: one with more of them weighs no more."""
    of = dict(zip(BENCHMARKS, scores, strict=True))
    return {d: sum(of[b] for b in names) / len(names) for d, names in DOMAINS.items()}


@pytest.mark.parametrize(
    ("student", "expected"),
    [
        (row(51.46, 65.31, 77.89, 93.84, 50.40), 0.9373),
        (row(52.71, 63.75, 75.00, 94.58, 48.80), 0.8818),
        (row(47.81, 59.58, 53.74, 88.79, 39.60), 0.3280),
    ],
)
def test_headroom_captured_of_the_published_rows(student, expected):
    base = row(45.42, 54.48, 42.69, 84.17, 35.80)
    teacher = row(54.79, 63.65, 78.40, 95.50, 51.20)
    assert mean_headroom_captured(base, teacher, student) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("student", "expected"), [(28.05, 0.356), (31.24, 0.834)])
def test_recovery_of_the_published_macro_means(student, expected):
    got = recovery({"all": 25.67}, {"all": 32.35}, {"all": student})
    assert got == pytest.approx(expected, abs=5e-4)


def test_recovery_is_one_quotient_of_means_not_a_mean_of_quotients():
    base, teacher, student = {"a": 0.0, "b": 0.4}, {"a": 0.2, "b": 0.8}, {"a": 0.2, "b": 0.6}
    assert recovery(base, teacher, student) == pytest.approx((0.4 - 0.2) / (0.5 - 0.2))
    assert mean_headroom_captured(base, teacher, student) == pytest.approx((1.0 + 0.5) / 2)


def test_quotients_without_meaning_are_none():
    assert headroom_captured(0.9, 0.9, 0.95) is None
    assert headroom_captured(0.9, 0.8, 0.95) is None
    assert headroom_captured(0.5, 0.6, 0.6, gain_lower_bound=-0.01) is None
    assert headroom_captured(0.5, 0.6, 0.6, gain_lower_bound=0.01) == pytest.approx(1.0)
    assert retention(0.5, 0.0) is None
    assert retention(0.45, 0.9) == pytest.approx(0.5)
    assert forgetting(0.6, 0.5) == pytest.approx(-0.1)


# --- bootstrap ---


def test_bootstrap_equals_the_textbook_standard_error():
    values = np.array([[1.0]] * 30 + [[0.0]] * 70)
    means = paired_bootstrap(values, replicates=20_000, seed=1)[:, 0]
    assert means.mean() == pytest.approx(0.3, abs=2e-3)
    assert means.std() == pytest.approx(math.sqrt(0.3 * 0.7 / 100), rel=0.03)


def test_bootstrap_is_paired():
    """A model that is right wherever another is must equal it in every replicate."""
    rng = np.random.default_rng(0)
    flags = rng.integers(0, 2, 50).astype(float)
    means = paired_bootstrap(np.stack([flags, flags, 1 - flags], 1), replicates=500, seed=0)
    np.testing.assert_array_equal(means[:, 0], means[:, 1])
    np.testing.assert_allclose(means[:, 0] + means[:, 2], 1.0, atol=1e-12)


def test_undefined_replicates_lie_beyond_both_ends():
    replicates = np.arange(100.0)
    assert interval(replicates) == [2.0, 97.0]
    replicates[50] = np.nan  # one in a hundred: both ends move outwards, none is lost
    assert interval(replicates) == [1.0, 98.0]
    replicates[40:50] = np.nan
    assert interval(replicates) == [None, None]


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """100 data sets of 200 items, p = (.5, .95, .9): truth .889; 95 % expected, 5 sd = 11 %."""
    rng = np.random.default_rng(7)
    truth, hits = (0.9 - 0.5) / (0.95 - 0.5), 0
    for k in range(100):
        u = rng.random(200)
        got = one_domain(items(u < 0.5), items(u < 0.95), items(u < 0.9), replicates=400, seed=k)
        low, high = got["domains"]["spell"]["ci95"]
        hits += low <= truth <= high
    assert 84 <= hits <= 100


# --- the result of a run ---


def test_result_has_the_stable_schema(tmp_path: Path):
    results = {
        "base": {"spell": items(50, 100), "sum": items(40, 100)},
        "teacher": {"spell": items(98, 100), "sum": items(95, 100)},
        "student": {"spell": items(95, 100), "sum": items(90, 100)},
    }
    got = build_retention(results, replicates=500, majority={"spell": 0.02})
    write_retention(got, tmp_path / "retention.json")
    read = json.loads((tmp_path / "retention.json").read_text())
    assert read == json.loads(json.dumps(got))
    assert set(read["domains"]) == {"spell", "sum"}
    for entry in read["domains"].values():
        keys = {"base", "teacher", "student", "retention", "headroom_captured", "n", "ci95"}
        assert keys <= set(entry)
    spell = read["domains"]["spell"]
    assert (spell["base"], spell["teacher"], spell["student"]) == (0.5, 0.98, 0.95)
    assert spell["retention"] == pytest.approx(0.95 / 0.98)
    assert spell["headroom_captured"] == pytest.approx(0.45 / 0.48)
    assert spell["n"] == 100 and spell["ci95_of"] == "headroom_captured"
    assert spell["ci95"][0] < spell["headroom_captured"] < spell["ci95"][1]
    assert spell["majority_baseline"] == 0.02
    assert read["domains"]["sum"]["majority_baseline"] is None
    assert read["mean_headroom_captured"] == pytest.approx((0.45 / 0.48 + 0.50 / 0.55) / 2)
    assert read["mean_headroom_ci95"][0] < read["mean_headroom_captured"]
    assert read["recovery"] == pytest.approx((0.925 - 0.45) / (0.965 - 0.45))


def test_seed_decides_and_a_further_domain_changes_nothing():
    def run(seed, extra):
        results = {
            r: {"spell": items(n, 60)} | ({"new": items(n, 40)} if extra else {})
            for r, n in (("base", 30), ("teacher", 58), ("student", 50))
        }
        return build_retention(results, replicates=200, seed=seed)["domains"]["spell"]

    assert run(3, False) == run(3, False) == run(3, True)
    assert run(3, False)["ci95"] != run(4, False)["ci95"]


@pytest.mark.parametrize(("base", "teacher"), [(90, 92), (95, 90), (100, 100)])
def test_headroom_not_clearly_above_zero_is_null_with_the_reason(base, teacher):
    rng = np.random.default_rng(0)
    flags = [list(rng.permutation([k < n for k in range(100)])) for n in (base, teacher)]
    got = one_domain(items(flags[0]), items(flags[1]), items(93, 100), replicates=500)
    entry = got["domains"]["spell"]
    assert entry["headroom_captured"] is None and "teacher - base" in entry["not_measurable_reason"]
    assert entry["ci95"] == entry["retention_ci95"] and entry["ci95_of"] == "retention"
    assert got["mean_headroom_captured"] is None and got["mean_headroom_domains"] == []
    assert got["recovery"] is None
    json.dumps(got, allow_nan=False)


def test_teacher_that_is_always_wrong():
    got = one_domain(items(0, 20), items(0, 20), items(5, 20), replicates=100)
    entry = got["domains"]["spell"]
    assert entry["retention"] is None and entry["ci95"] == [None, None]
    assert entry["ci95_of"] is None
    json.dumps(got, allow_nan=False)


def test_partial_credit_is_beside_exact_match_and_can_be_the_measure():
    half = items(10, 20, score=0.5)
    got = one_domain(half, items(20, 20), items(20, 20, score=0.9), replicates=100)
    entry = got["domains"]["spell"]
    assert entry["base"] == entry["exact"]["base"] == 0.5 and entry["partial"]["student"] == 0.9
    got = one_domain(half, items(20, 20), items(20, 20, score=0.9), measure="score", replicates=100)
    assert got["domains"]["spell"]["student"] == pytest.approx(0.9)


def test_items_order_does_not_matter_but_items_do():
    teacher = items(95, 100)
    got = one_domain(items(50, 100), teacher[::-1], items(90, 100), replicates=200)
    assert got == one_domain(items(50, 100), teacher, items(90, 100), replicates=200)


def test_item_the_verifier_failed_on_is_left_out_for_all_and_counted():
    base, teacher, student = items(5, 10), items(10, 10), items(9, 10)
    student[9] = ItemResult("d/9", None, None, 3, "stop")  # was the only wrong one
    entry = one_domain(base, teacher, student, replicates=100)["domains"]["spell"]
    assert entry["n"] == 9 and entry["n_unscored"] == 1
    assert entry["student"] == 1.0 and entry["base"] == pytest.approx(5 / 9)


def test_domain_without_verifier_is_an_entry_without_scores():
    unjudged = [ItemResult(f"w/{k}", None, None, 7, "length") for k in range(4)]
    results = {
        r: {"spell": items(n, 60), "write": unjudged}
        for r, n in (("base", 30), ("teacher", 58), ("student", 50))
    }
    got = build_retention(results, replicates=100)
    write = got["domains"]["write"]
    assert write["student"] is None and write["headroom_captured"] is None
    assert (write["n"], write["n_unscored"]) == (0, 4)
    assert write["truncated_fraction"]["student"] == 1.0
    assert set(write) == set(got["domains"]["spell"])
    assert got["mean_headroom_captured"] == got["domains"]["spell"]["headroom_captured"]
    assert "not scored" in retention_markdown(got)


def test_domain_without_teacher_shows_forgetting():
    results = {
        "base": {"spell": items(30, 60), "general": items(40, 50)},
        "teacher": {"spell": items(58, 60)},
        "student": {"spell": items(50, 60), "general": items(30, 50)},
    }
    got = build_retention(results, replicates=200, without_teacher=["general"])
    assert set(got["domains"]) == {"spell"}
    assert got["forgetting"]["general"]["forgetting"] == pytest.approx(-0.2)
    assert got["forgetting"]["general"]["ci95"][1] < 0
    with pytest.raises(DataError, match="only base has.*general"):
        build_retention(results, replicates=10)


# --- refused ---


def test_different_items_are_named():
    student = items(90, 100)
    student[3] = ItemResult("d/other", True, 1.0, 1, "stop")
    with pytest.raises(DataError, match=r"'spell': student and base.*'d/other'.*'d/3'"):
        one_domain(items(50, 100), items(95, 100), student)


def test_repeated_items_are_named():
    with pytest.raises(DataError, match=r"base answered item\(s\) more than once: \['d/0'\]"):
        one_domain(items(1, 2) + items(1, 1), items(2, 2), items(2, 2))


@pytest.mark.parametrize("score", [1.5, -0.1, math.nan, math.inf])
def test_score_out_of_range_is_refused(score):
    with pytest.raises(DataError, match=r"student, item 'd/0'.*not in \[0, 1\]"):
        one_domain(items(1, 2), items(2, 2), items(2, 2, score=score))


def test_half_judged_item_is_refused():
    bad = [ItemResult("d/0", None, 0.5, 1, "stop"), *items(2, 2)[1:]]
    with pytest.raises(DataError, match="either judged"):
        one_domain(items(1, 2), items(2, 2), bad)


def test_missing_role_or_domain_is_named():
    with pytest.raises(DataError, match="roles"):
        build_retention({"base": {"a": items(1, 2)}, "student": {"a": items(1, 2)}})
    with pytest.raises(DataError, match="no held-out item"):
        one_domain([], [], [])


# --- tables ---


def test_tables_show_every_cell_literally():
    got = one_domain(items(50, 100), items(98, 100), items(94, 100), majority={"spell": 0.031})
    low, high = got["domains"]["spell"]["ci95"]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(retention_table(got))
    for text in (retention_markdown(got), console.export_text()):
        for cell in (
            "spell",
            "0.031",
            "0.500",
            "0.980",
            "0.940",
            "0.959",
            "100",
            f"0.917 [{low:.3f}, {high:.3f}]",
        ):
            assert cell in text, cell
    assert retention_markdown(got).splitlines()[1].count("|") == 10


# --- tests, bounds, format, domains of several sets ---


def test_student_that_copies_its_teacher_has_retention_one_and_a_p_value_that_says_so():
    base = items(40, 100)
    teacher = items([k % 10 != 0 for k in range(100)])
    entry = one_domain(base, teacher, teacher, replicates=300)["domains"]["spell"]
    assert entry["retention"] == 1.0 and entry["headroom_captured"] == 1.0
    against = entry["tests"]["student_against_teacher"]
    assert against == {"p": 1.0, "test": "McNemar", "better": 0, "worse": 0}
    assert entry["tests"]["student_against_base"]["p"] < 1e-6
    # No item differs among 100: up to 3.6 % could and still show none.
    assert entry["retention_ci95"] == [1.0, 1.0]
    unseen = 1 - 0.025 ** (1 / 100)
    assert entry["retention_lower"] == pytest.approx(1 - unseen / 0.9, abs=1e-12)
    assert entry["headroom_lower"] == pytest.approx(1 - unseen / 0.5, abs=1e-12)


def test_a_student_that_is_never_worse_is_not_surer_for_one_answer_more():
    base, teacher = items(40, 100), items(90, 100)
    same, better = (
        one_domain(base, teacher, items(right, 100), replicates=300)["domains"]["spell"]
        for right in (90, 91)
    )
    assert better["retention_ci95"][0] == 1.0
    for key in ("retention_lower", "headroom_lower"):
        assert same[key] < better[key] < 1.0


def test_bound_is_the_intervals_own_end_where_that_has_width():
    entry = one_domain(items(40, 100), items(90, 100), items(85, 100), replicates=300)
    entry = entry["domains"]["spell"]
    assert entry["retention_lower"] == entry["retention_ci95"][0]
    assert entry["change_lower"] == entry["change_ci95"][0]


def test_domain_of_two_sets_is_the_mean_of_their_means():
    """A long set must not outweigh a short one, in points, intervals and tests alike."""
    counts = {"long": (200, (50, 150, 100)), "short": (40, (10, 40, 40))}
    roles = {
        role: {name: items(right[k], n, prefix=name) for name, (n, right) in counts.items()}
        for k, role in enumerate(("base", "teacher", "student"))
    }
    result = build_retention(roles, domains={"math": ["long", "short"]}, replicates=400)
    entry = result["domains"]["math"]
    assert (entry["base"], entry["teacher"], entry["student"]) == (0.25, 0.875, 0.75)
    assert entry["n"] == 240 and entry["sets"]["short"]["student"] == 1.0
    assert entry["headroom_captured"] == pytest.approx(0.8)
    assert entry["tests"]["student_against_teacher"]["test"] == "permutation"
    low, high = entry["student_ci95"]
    # The long set's sd of the mean is .035, the short one's 0; half of it is the mean's.
    assert 0.75 - low == pytest.approx(1.96 * 0.0354 / 2, abs=0.012) and low < 0.75 < high
    with pytest.raises(DataError, match="each of the sets"):
        build_retention(roles, domains={"math": ["long"]})


def lenient_items(strict, lenient):
    return [
        ItemResult(f"d/{k}", s, float(s), 5, "stop", "text", 0.0, False, s or n)
        for k, (s, n) in enumerate(zip(strict, lenient, strict=True))
    ]


def test_gain_of_form_only_is_flagged_and_a_real_one_is_not():
    right = [k % 5 != 0 for k in range(100)]
    never = [False] * 100
    base_knows = lenient_items(never, right)  # right words in the wrong dress
    base_does_not = lenient_items(never, never)
    student = lenient_items(right, right)
    entry = one_domain(base_knows, student, student, replicates=300)["domains"]["spell"]
    assert entry["only_format"]["flagged"] is True and entry["only_format"]["change"] == 0.0
    entry = one_domain(base_does_not, student, student, replicates=300)["domains"]["spell"]
    assert entry["only_format"]["flagged"] is False
    assert entry["only_format"]["change"] == pytest.approx(0.8)
    # Records from before answers were kept cannot say.
    entry = one_domain(items(0, 100), items(80, 100), items(80, 100), replicates=50)
    assert entry["domains"]["spell"]["only_format"] is None
