"""The report's plots, as inline SVG, and the table of a step's stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mopd.evaluation import svg
from mopd.evaluation.run_files import RunFiles
from mopd.evaluation.tables import captured_cell


@dataclass(frozen=True)
class Figure:
    """One plot with its heading, what it shows, and its legend (label, colour)."""

    title: str
    caption: str
    svg: Markup
    legend: tuple[tuple[str, int], ...] = ()


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
