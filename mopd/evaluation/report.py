"""``report.html``, ``report.md`` and ``report.json`` of a run, made only from its directory.

The page stands alone: styles and plots are inline, nothing is fetched, no script runs (filters are
style rules on radio buttons). It can be made of a run that was interrupted, and then says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from mopd.errors import DataError
from mopd.evaluation import report_figures as figures
from mopd.evaluation import report_methods as methods
from mopd.evaluation import report_samples as samples
from mopd.evaluation import report_sections as sections
from mopd.evaluation.outcome import RETENTION
from mopd.evaluation.report_tables import markdown_tables, report_tables
from mopd.evaluation.run_files import Record, RunFiles, read_run
from mopd.evaluation.tables import (
    COLUMNS,
    retention_markdown,
    retention_notes,
    retention_rows,
    with_interval,
)


def write_report(run_dir: Path, damaged: Callable[[str], None] = lambda _: None) -> Path:
    """Write ``report.html``, ``report.md`` and ``report.json`` into `run_dir`; the HTML's path.

    Args:
        damaged: told of every file that is there and cannot be used; the report says it, too.

    Raises:
        DataError: `run_dir` is not a run's directory.
    """
    return report_of(read_run(run_dir), damaged)


def report_of(run: RunFiles, damaged: Callable[[str], None] = lambda _: None) -> Path:
    """As `write_report`, of files that were read."""
    run_dir = run.run_dir
    for text in run.damaged:
        damaged(f"{run_dir}: {text}")
    environment = Environment(
        loader=FunctionLoader(_template),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("page.html.j2").render(page(run))
    _replace(run_dir / "report.md", markdown(run))
    _replace(run_dir / "report.json", json.dumps(summary(run), indent=1) + "\n")
    return _replace(run_dir / "report.html", html)


def _template(name: str) -> str:
    return resources.files("mopd.evaluation").joinpath("templates", name).read_text("utf-8")


def retention_of(run: RunFiles) -> Record:
    """The run's retention.json.

    Raises:
        DataError: there is none that can be read: the run was not finished.
    """
    if run.retention is None:
        why = next((text for text in run.damaged if text.startswith(RETENTION)), None)
        raise DataError(
            f"{run.run_dir} has no {RETENTION} that can be read: "
            f"{why or 'its final evaluation is missing;'} "
            "Finish the run (resume=true), or evaluate its student: mopd evaluate CONFIG"
        )
    return run.retention


def verdict(run: RunFiles) -> str:
    """The run in one or two sentences."""
    if run.retention is None and run.evaluation is not None and not run.metrics:
        return "No student was evaluated: what follows is of the base and the teachers."
    if run.retention is None:
        planned = f" of {run.steps_planned}" if run.steps_planned is not None else ""
        if (run.run_dir / RETENTION).exists():
            return (
                f"{run.steps_done}{planned} steps are recorded, and the final evaluation cannot be "
                "read: see the notes. What follows is what there is."
            )
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
    return " ".join([*parts, *_further(run)])


def _further(run: RunFiles) -> list[str]:
    """What else the one line must not hide: forgetting, gains of form, simpler ways ahead."""
    assert run.retention is not None
    parts = []
    forgotten = [
        f"{name} ({with_interval(entry['forgetting'], entry['ci95'])})"
        for name, entry in run.retention.get("forgetting", {}).items()
        if entry["ci95"][1] is not None and entry["ci95"][1] < 0
    ]
    if forgotten:
        parts.append(f"It has forgotten something of {_listed(forgotten)}.")
    of_form = [
        name
        for name, entry in run.retention["domains"].items()
        if (entry.get("only_format") or {}).get("flagged")
    ]
    if of_form:
        parts.append(f"The gain in {_listed(of_form)} is one of form: see the notes.")
    router = (run.evaluation or {}).get("router") or {}
    means = router.get("models") or {}
    own = means.get("student")
    if router.get("router") is not None and own is not None:
        parts.append(
            f"Mean score {own:.3f}; a perfect router over its teachers would score "
            f"{router['router']:.3f}."
        )
    parts += methods.comparison_sentences(run)
    return parts


def facts(run: RunFiles) -> list[tuple[str, str]]:
    """The run's size at a glance."""
    found = []
    planned = f" of {run.steps_planned}" if run.steps_planned is not None else ""
    if run.metrics or not run.evaluation:
        found.append(("steps", f"{run.steps_done}{planned}"))
    if run.metrics and isinstance(run.metrics[-1].get("time_s"), (int, float)):
        found.append(("run time", f"{run.metrics[-1]['time_s'] / 60:.1f} min"))
    general = run.general
    found.append(("domains", str(len([d for d in run.domains if d not in general]))))
    if general:
        found.append(("general sets", ", ".join(general)))
    steps = run.curve("time/step_s")
    if steps:
        middle = sorted(value for _, value in steps)[len(steps) // 2]
        found.append(("median step", f"{middle:.2f} s"))
    samples, tokens = run.curve("samples"), run.curve("tokens")
    if samples:
        found.append(("samples", f"{sum(v for _, v in samples):,.0f}"))
    if tokens:
        found.append(("response tokens", f"{sum(v for _, v in tokens):,.0f}"))
    best = run.best or {}
    if isinstance(best.get("value"), float):
        criterion = str(best.get("criterion")).replace("_", " ")
        found.append(("best student", f"step {best.get('step')}, {criterion} {best['value']:.3f}"))
        if best.get("ended_early_after") is not None:
            found.append(("ended early", f"after step {best['ended_early_after']}"))
    if calls := evaluation_calls(run):
        asked, seconds = (sum(c[k] for c in calls) for k in ("answers_asked", "wall_s"))
        found.append(("evaluation", f"{asked:,} answers, {seconds:,.0f} s"))
    if "seed" in run.config:
        found.append(("seed", str(run.config["seed"])))
    return found


def evaluation_calls(run: RunFiles) -> list[Record]:
    """What each call that asked for answers took; those of the training run are not among them."""
    cost = (run.evaluation or {}).get("cost") or {}
    return [c for c in (*cost.get("earlier", []), cost) if c.get("answers_asked")]


def markdown(run: RunFiles) -> str:
    """``report.md``: verdict, tables and facts."""
    parts = [f"# {run.name}", verdict(run)]
    if run.retention is not None:
        parts.append(retention_markdown(run.retention).rstrip())
    parts += markdown_tables(run)
    parts.append("\n".join(f"- {key}: {value}" for key, value in facts(run)))
    if said := [*warned(run), *run.problems]:
        parts.append("\n".join(f"- {line}" for line in said))
    if run.versions:
        parts.append("Versions: " + ", ".join(f"{k} {v}" for k, v in run.versions.items()))
    return "\n\n".join(parts) + "\n"


def warned(run: RunFiles) -> list[str]:
    """What the run warned of, for people."""
    return [f"Warned: {text}" for text in run.warnings]


def summary(run: RunFiles) -> dict[str, Any]:
    """``report.json``: what the page says, for programs."""
    return {
        "name": run.name,
        "verdict": verdict(run),
        "finished": run.retention is not None,
        "facts": dict(facts(run)),
        "retention": run.retention,
        "evaluation": run.evaluation,
        "cost": {
            "unit": sections.cost_unit(run),
            "points_gained": sections.points_gained(run),
            "stages": [
                dict(zip(("stage", "wall_s", "reserved_s", "share", "a_point"), row, strict=True))
                for row in sections.cost_rows(run)
            ],
        },
        "failures": [
            {"cause": cause, "samples": lost, "steps": steps}
            for cause, lost, steps in sections.failure_rows(run)
        ],
        "warnings": run.warnings,
        "problems": run.problems,
        "versions": run.versions,
    }


def page(run: RunFiles) -> dict[str, Any]:
    """Everything the template shows."""
    return {
        "name": run.name,
        "verdict": verdict(run),
        "finished": run.retention is not None,
        "facts": facts(run),
        "problems": [*warned(run), *run.problems],
        "columns": COLUMNS,
        "rows": retention_rows(run.retention) if run.retention is not None else [],
        "notes": retention_notes(run.retention) if run.retention is not None else [],
        "tables": report_tables(run),
        "retention_figures": figures.retention_figures(run),
        "heat_map": sections.heat_map(run),
        "learning_figures": figures.learning_figures(run),
        "browser": samples.sample_browser(run),
        "training_figures": figures.training_figures(run),
        "time_figure": figures.time_figure(run),
        "transcripts": samples.chosen_transcripts(run),
        "clip": samples.CLIP_NATS,
        "config": run.config_text,
        "versions": run.versions,
    }


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _replace(path: Path, text: str) -> Path:
    """Whole or not at all; a lone surrogate (half a byte token) becomes a visible '?'."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_bytes(text.encode("utf-8", errors="replace"))
    os.replace(temporary, path)
    return path
