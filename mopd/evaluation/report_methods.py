"""The report's comparison of methods: the student beside simpler ways, and beside other seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mopd.evaluation.report_sections import p_value
from mopd.evaluation.run_files import RunFiles
from mopd.evaluation.tables import NONE, number, with_interval
from mopd.evaluation.trained import of_the_same_recipe, seed_rows

CLEAR = 0.05
"""p-value below which a lead is called clear."""

METHOD_COLUMNS = (
    "model", "mean", "headroom captured [95%]", "model − student [95%]", "p", "right alone",
    "trained tokens", "step seconds",
)  # fmt: skip


def method_rows(run: RunFiles) -> list[tuple[str, ...]]:
    """The student, then every further model that is not the same recipe under another seed."""
    evaluation = run.evaluation or {}
    others: Mapping[str, Any] = evaluation.get("others") or {}
    if not others or run.retention is None:
        return []
    seeds = set(of_the_same_recipe(evaluation))
    means = (evaluation.get("router") or {}).get("models") or {}
    retention = run.retention
    captured = with_interval(
        retention["mean_headroom_captured"], retention.get("mean_headroom_ci95")
    )
    rows: list[tuple[str, ...]] = [
        ("student", number(means.get("student")), captured, "", "", "", *_training(run, "student"))
    ]
    for name, entry in others.items():
        if name in seeds:
            continue
        captured = with_interval(entry["mean_headroom_captured"], entry.get("mean_headroom_ci95"))
        lead = entry.get("lead")
        cells = ("", "", "")
        if lead is not None:
            change = f"{signed(lead['value'])} " + _interval(lead["ci95"])
            alone = f"{lead['better']} / {lead['worse']}"
            cells = (change, p_value(lead["p"]), alone)
        rows.append((name, number(entry["mean"]), captured, *cells, *_training(run, name)))
    return rows


def _training(run: RunFiles, name: str) -> tuple[str, str]:
    """(trained response tokens, seconds of its steps); a merge has neither."""
    training = (((run.evaluation or {}).get("models") or {}).get(name) or {}).get("training") or {}
    tokens, seconds = training.get("tokens"), training.get("step_seconds")
    if not training and name == "student":  # evaluated at the end of its own run
        tokens = math.fsum(v for _, v in run.curve("tokens")) or None
        seconds = math.fsum(v for _, v in run.curve("time/step_s")) or None
    return (
        NONE if tokens is None else f"{tokens:,.0f}",
        NONE if seconds is None else f"{seconds:,.0f}",
    )


def _interval(ci95: tuple[float | None, float | None] | list[float | None]) -> str:
    return "[" + ", ".join(NONE if end is None else signed(end) for end in ci95) + "]"


def seeds(run: RunFiles) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(columns, rows) of headroom captured by seed, with mean and standard deviation."""
    columns, rows = seed_rows(run.evaluation or {}, run.retention)
    return ("seed", *columns), [
        (label, *(number(values[column]) for column in columns)) for label, values in rows
    ]


def comparison_sentences(run: RunFiles) -> list[str]:
    """Which simpler ways are ahead of the student, and what other seeds gave."""
    evaluation = run.evaluation or {}
    others = evaluation.get("others") or {}
    means = (evaluation.get("router") or {}).get("models") or {}
    own, parts = means.get("student"), []
    same = of_the_same_recipe(evaluation)
    ahead = [
        f"{name} ({_lead(means[name], others[name].get('lead'))})"
        for name in others
        if name not in same
        and own is not None
        and means.get(name) is not None
        and means[name] > own
    ]
    if ahead:
        listed = ahead[0] if len(ahead) == 1 else ", ".join(ahead[:-1]) + " and " + ahead[-1]
        parts.append(f"Ahead of it {'is' if len(ahead) == 1 else 'are'} {listed}.")
    _, rows = seed_rows(evaluation, run.retention)
    if rows and (mean := rows[-2][1]["mean"]) is not None:
        each = ", ".join(number(values["mean"]) for _, values in rows[:-2])
        parts.append(
            f"Over {len(rows) - 2} seeds of its recipe the mean headroom captured is {mean:.3f} ± "
            f"{rows[-1][1]['mean']:.3f} ({each})."
        )
    return parts


def signed(value: float) -> str:
    """``+0.004``; what rounds to nothing has no sign, which would tell of a difference."""
    return f"{round(value, 3) + 0.0:+.3f}" if round(value, 3) else "0.000"


def _lead(mean: float, lead: Mapping[str, Any] | None) -> str:
    """``0.990, by +0.004 [-0.003, +0.011], which may be chance``."""
    if lead is None:
        return number(mean)
    doubt = "" if lead["p"] < CLEAR else ", which may be chance"
    return f"{mean:.3f}, by {signed(lead['value'])} {_interval(lead['ci95'])}{doubt}"
