"""``report.html`` and ``report.md`` of a run, made only from the files in its directory.

The page stands alone: styles and plots are inline, nothing is fetched, no script runs. It can be
made of a run that was interrupted, and then says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mopd.errors import DataError
from mopd.evaluation import svg
from mopd.evaluation.run_files import Record, RunFiles, read_run
from mopd.evaluation.tables import (
    COLUMNS,
    captured_cell,
    retention_markdown,
    retention_notes,
    retention_rows,
)

TRANSCRIPTS_PER_DOMAIN = 3
CLIP_NATS = 5.0  # a token's colour is full at |teacher - student| of this many nats


@dataclass(frozen=True)
class Figure:
    """One plot with its heading, what it shows, and its legend (label, colour)."""

    title: str
    caption: str
    svg: Markup
    legend: tuple[tuple[str, int], ...] = ()


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` and ``report.md`` into `run_dir`; returns the HTML's path.

    Raises:
        DataError: `run_dir` is not a run's directory.
    """
    run = read_run(run_dir)
    template = resources.files("mopd.evaluation").joinpath("report.html.j2").read_text("utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    html = environment.from_string(template).render(page(run))
    _replace(run_dir / "report.md", markdown(run))
    return _replace(run_dir / "report.html", html)


def read_retention(run_dir: Path) -> Record:
    """The run's retention.json.

    Raises:
        DataError: there is none: the run was not finished, or is not a run.
    """
    retention = read_run(run_dir).retention
    if retention is None:
        raise DataError(
            f"{run_dir} has no retention.json that can be read: its final evaluation is missing; "
            "finish the run (resume=true), or evaluate its student: mopd evaluate CONFIG"
        )
    return retention


def verdict(run: RunFiles) -> str:
    """The run in one or two sentences."""
    if run.retention is None:
        planned = f" of {run.steps_planned}" if run.steps_planned is not None else ""
        return (
            f"Not finished: {run.steps_done}{planned} steps are recorded and the final evaluation "
            "is missing. What follows is what there is."
        )
    domains: dict[str, Record] = run.retention["domains"]
    measured = {n: e for n, e in domains.items() if e["headroom_captured"] is not None}
    parts = []
    if measured:
        worst = min(measured, key=lambda n: measured[n]["headroom_captured"])
        mean = run.retention["mean_headroom_captured"]
        text = f"The student captures {mean:.1%} of its teachers' headroom"
        if len(measured) > 1:
            text += (
                f" on average of {len(measured)} domains; least in {worst}: "
                f"{measured[worst]['headroom_captured']:.1%}"
            )
        else:
            text += f" in {worst}"
        parts.append(text + ".")
    unmeasured = [n for n in domains if n not in measured]
    if unmeasured:
        parts.append(f"Headroom could not be measured in {_listed(unmeasured)}.")
    lost = [
        f"{n} ({e['student']:.3f} after, {e['base']:.3f} before)"
        for n, e in domains.items()
        if (e.get("change_ci95") or [None, None])[1] is not None and e["change_ci95"][1] < 0
    ]
    if lost:
        parts.append(f"It is worse than its base in {_listed(lost)}.")
    return " ".join(parts)


def facts(run: RunFiles) -> list[tuple[str, str]]:
    """The run's size at a glance."""
    found = []
    planned = f" of {run.steps_planned}" if run.steps_planned is not None else ""
    found.append(("steps", f"{run.steps_done}{planned}"))
    if run.metrics and isinstance(run.metrics[-1].get("time_s"), (int, float)):
        found.append(("run time", f"{run.metrics[-1]['time_s'] / 60:.1f} min"))
    found.append(("domains", str(len(run.domains))))
    steps = run.curve("time/step_s")
    if steps:
        middle = sorted(value for _, value in steps)[len(steps) // 2]
        found.append(("median step", f"{middle:.2f} s"))
    samples, tokens = run.curve("samples"), run.curve("tokens")
    if samples:
        found.append(("samples", f"{sum(v for _, v in samples):,.0f}"))
    if tokens:
        found.append(("response tokens", f"{sum(v for _, v in tokens):,.0f}"))
    if "seed" in run.config:
        found.append(("seed", str(run.config["seed"])))
    return found


def markdown(run: RunFiles) -> str:
    """``report.md``: verdict, table and facts."""
    parts = [f"# {run.name}", verdict(run)]
    if run.retention is not None:
        parts.append(retention_markdown(run.retention).rstrip())
    parts.append("\n".join(f"- {key}: {value}" for key, value in facts(run)))
    if run.problems:
        parts.append("\n".join(f"- {problem}" for problem in run.problems))
    if run.versions:
        parts.append("Versions: " + ", ".join(f"{k} {v}" for k, v in run.versions.items()))
    return "\n\n".join(parts) + "\n"


def page(run: RunFiles) -> dict[str, Any]:
    """Everything the template shows."""
    return {
        "name": run.name,
        "verdict": verdict(run),
        "finished": run.retention is not None,
        "facts": facts(run),
        "problems": run.problems,
        "columns": COLUMNS,
        "rows": retention_rows(run.retention) if run.retention is not None else [],
        "notes": retention_notes(run.retention) if run.retention is not None else [],
        "answer_rows": answer_rows(run),
        "retention_figures": retention_figures(run),
        "learning_figures": learning_figures(run),
        "training_figures": training_figures(run),
        "time_figure": time_figure(run),
        "stage_rows": stage_rows(run),
        "failures": failure_rows(run),
        "transcripts": chosen_transcripts(run),
        "clip": CLIP_NATS,
        "config": run.config_text,
        "versions": run.versions,
    }


# --- plots ---


def retention_figures(run: RunFiles) -> list[Figure]:
    """Bars of headroom captured and of retention."""
    if run.retention is None:
        return []
    headroom, retained = [], []
    for name, entry in run.retention["domains"].items():
        captured = entry["headroom_captured"]
        low, high = entry["ci95"] if captured is not None else (None, None)
        headroom.append(svg.Bar(name, captured, low, high, captured_cell(entry)))
        low, high = entry.get("retention_ci95") or (None, None)
        retained.append(svg.Bar(name, entry["retention"], low, high, "not scored", 2))
    return [
        Figure(title, caption, Markup(svg.bar_chart(bars, name=title)))
        for title, caption, bars in (
            ("Headroom captured", "(student − base) / (teacher − base), 95% interval.", headroom),
            ("Retention", "student / teacher, 95% interval.", retained),
        )
    ]


def learning_figures(run: RunFiles) -> list[Figure]:
    """Exact match on held-out items over the steps, one plot a domain."""
    figures = []
    for domain in run.domains:
        seen: dict[str, list[svg.Point]] = {"base": [], "teacher": [], "student": []}
        for e in run.evaluations:
            if e["domain"] == domain and isinstance(e.get("correct"), (int, float)):
                seen.setdefault(e["who"], []).append((e["step"], float(e["correct"])))
        references = [
            svg.Reference(who, seen[who][-1][1], who) for who in ("teacher", "base") if seen[who]
        ]
        # The base is the student before its first step.
        points = sorted(dict([*[(0, y) for _, y in seen["base"][-1:]], *seen["student"]]).items())
        whiskers = []
        entry = run.retention["domains"].get(domain) if run.retention is not None else None
        if entry is not None and points and None not in (entry.get("student_ci95") or [None]):
            whiskers = [svg.Whisker(points[-1][0], *entry["student_ci95"])]
        chart = svg.line_chart(
            [svg.Line("student", points, markers=True)],
            name=f"{domain}: exact match on held-out items over steps",
            y_range=(0.0, 1.03),
            x_max=run.steps_planned,
            references=references,
            whiskers=whiskers,
        )
        if chart:
            figures.append(Figure(domain, "", Markup(chart), (("student", 0),)))
    return figures


def training_figures(run: RunFiles) -> list[Figure]:
    """Curves of the training steps: by domain, then of the whole step."""
    by_domain = (
        ("reverse_kl", "Reverse KL to the teacher", "log π − log T, mean per token, nats", False),
        ("mask_fraction", "Mask fraction", "tokens dropped by the IcePop band", True),
        ("reward", "Reward", "mean reward of the sampled answers", False),
        ("response_length", "Response length", "mean tokens of an answer", False),
    )
    overall = (
        ("train_rollout_kl_k3", "Trainer against rollout engine", "KL estimate k3, nats", False),
        ("grad_norm", "Gradient norm", "before clipping", False),
        ("lr", "Learning rate", "of the step", False),
    )
    window = max(1, min(20, len(run.metrics) // 10))
    figures = []
    for key, title, caption, percent in by_domain:
        lines = [
            svg.Line(domain, run.domain_curve(domain, key), k % svg.COLOURS)
            for k, domain in enumerate(run.domains)
        ]
        figures.append(_curves(run, title, caption, lines, window, percent))
    for key, title, caption, percent in overall:
        smooth = 1 if key == "lr" else window
        lines = [svg.Line(title, run.curve(key))]
        figures.append(_curves(run, title, caption, lines, smooth, percent))
    return [figure for figure in figures if figure is not None]


def _curves(
    run: RunFiles,
    title: str,
    caption: str,
    lines: Sequence[svg.Line],
    window: int,
    percent: bool,
) -> Figure | None:
    lines = [line for line in lines if line.points]
    chart = svg.line_chart(lines, name=title, smooth=window, percent=percent)
    if not chart:
        return None
    how = f"; bold: mean of the last {window} steps" if window > 1 else ""
    legend = tuple((line.label, line.colour) for line in lines) if len(lines) > 1 else ()
    return Figure(title, f"{caption}{how}.", Markup(chart), legend)


def stages(run: RunFiles) -> list[str]:
    """Stages of a step by their metrics ``time/STAGE_s``, as first seen; 'other' last."""
    names: dict[str, None] = {}
    for record in run.metrics:
        for key in record:
            if key.startswith("time/") and key.endswith("_s"):
                names[key[len("time/") : -len("_s")]] = None
    names.pop("step", None)
    return sorted(names, key=lambda name: name == "other")


def time_figure(run: RunFiles) -> Figure | None:
    """Seconds of each stage, stacked, over the steps."""
    names = stages(run)
    if not names:
        return None
    columns = [
        (r["step"], [max(0.0, r.get(f"time/{name}_s") or 0.0) for name in names])
        for r in run.metrics
    ]
    title = "Time of a step by stage"
    legend = tuple((name, k % svg.COLOURS) for k, name in enumerate(names))
    chart = svg.stacked_chart(names, columns, name=title)
    return Figure(title, "Seconds.", Markup(chart), legend)


def stage_rows(run: RunFiles) -> list[tuple[str, str, str, str]]:
    """(stage, median seconds, mean seconds, share of all stages' time)."""
    sums = {name: [v for _, v in run.curve(f"time/{name}_s")] for name in stages(run)}
    total = math.fsum(math.fsum(values) for values in sums.values())
    return [
        (
            name,
            f"{sorted(values)[len(values) // 2]:.3f}",
            f"{math.fsum(values) / len(values):.3f}",
            f"{math.fsum(values) / total:.1%}" if total > 0 else "–",
        )
        for name, values in sums.items()
        if values
    ]


# --- tables ---


def answer_rows(run: RunFiles) -> list[tuple[str, ...]]:
    """What the scores do not show: partial credit, length and truncation, base / teacher / student.

    (domain, partial credit, mean response tokens, truncated)
    """
    if run.retention is None:
        return []

    def triple(values: Mapping[str, float | None] | None, form: str) -> str:
        values = values or {}
        found = [values.get(role) for role in ("base", "teacher", "student")]
        return " / ".join("–" if v is None else format(v, form) for v in found)

    return [
        (
            name,
            triple(entry.get("partial"), ".3f"),
            triple(entry.get("mean_response_tokens"), ".1f"),
            triple(entry.get("truncated_fraction"), ".1%"),
        )
        for name, entry in run.retention["domains"].items()
    ]


def failure_rows(run: RunFiles) -> list[tuple[str, int, int]]:
    """(cause, samples lost, steps in which that happened) from the metrics ``failures/CAUSE``."""
    rows: dict[str, tuple[int, int]] = {}
    for record in run.metrics:
        for key, value in record.items():
            if key.startswith("failures/") and key != "failures/fraction" and value:
                lost, steps = rows.get(key[len("failures/") :], (0, 0))
                rows[key[len("failures/") :]] = (lost + int(value), steps + 1)
    return [(cause, lost, steps) for cause, (lost, steps) in sorted(rows.items())]


# --- transcripts ---


def chosen_transcripts(run: RunFiles) -> list[dict[str, Any]]:
    """Per domain the first recorded answer, the last wrong one and the last right one."""
    chosen: list[dict[str, Any]] = []
    for domain in run.domains:
        own = [t for t in run.transcripts if t["domain"] == domain]
        picks = [
            *own[:1],
            *[t for t in own[1:] if not t.get("correct")][-1:],
            *[t for t in own[1:] if t.get("correct")][-1:],
        ]
        chosen += [_transcript(t) for t in picks[:TRANSCRIPTS_PER_DOMAIN]]
    return chosen


def _transcript(record: Record) -> dict[str, Any]:
    tokens = record.get("tokens") or []
    differences = record.get("teacher_minus_student") or []
    if len(differences) != len(tokens):
        differences = [None] * len(tokens)
    spans = [_span(str(token), d) for token, d in zip(tokens, differences, strict=True)]
    verdicts = {True: "right", False: "wrong", None: "not judged"}
    return {
        "step": record["step"],
        "domain": record["domain"],
        "verdict": verdicts.get(record.get("correct"), "not judged"),
        "prompt": record["prompt"],
        "response": record["response"],
        "spans": spans,
    }


def _span(token: str, difference: float | None) -> dict[str, str]:
    """A token with its colour: hue by the sign, strength by the size, nothing below 0.05 nats."""
    if difference is None:
        return {"text": _visible(token), "css": "none", "strength": "0", "title": "not scored"}
    size = min(1.0, abs(difference) / CLIP_NATS)
    side = "neg" if difference < 0 else "pos"
    return {
        "text": _visible(token),
        "css": side if abs(difference) >= 0.05 else "none",
        "strength": f"{0.1 + 0.7 * size:.2f}",
        "title": f"teacher − student = {difference:+.3f} nats",
    }


def _visible(token: str) -> str:
    """Line ends and an empty token would be invisible as coloured spans."""
    return token.replace("\n", "⏎\n").replace("\t", "⇥") or "∅"


# --- small parts ---


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _replace(path: Path, text: str) -> Path:
    """Whole or not at all; a lone surrogate (half a byte token) becomes a visible '?'."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_bytes(text.encode("utf-8", errors="replace"))
    os.replace(temporary, path)
    return path
