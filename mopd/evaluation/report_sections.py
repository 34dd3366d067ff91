"""The report's tables: tests, answers beside right and wrong, every model, cost, failures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mopd.evaluation.report_figures import stages
from mopd.evaluation.run_files import Record, RunFiles
from mopd.evaluation.tables import NONE, number, with_interval

FULL_COLOUR = 0.5
"""Change of the score at which a cell of the heat map has its full colour."""


def answer_rows(run: RunFiles) -> list[tuple[str, ...]]:
    """What the scores do not show, base / teacher / student each:

    (set, partial credit, lenient, mean response tokens, truncated, format errors, repetition)
    """
    if run.retention is None:
        return []

    def triple(values: Mapping[str, float | None] | None, form: str) -> str:
        values = values or {}
        found = [values.get(role) for role in ("base", "teacher", "student")]
        return " / ".join(NONE if v is None else format(v, form) for v in found)

    entries = {**run.retention["domains"], **run.retention.get("forgetting", {})}
    return [
        (
            name,
            triple(entry.get("partial"), ".3f"),
            triple(entry.get("lenient"), ".3f"),
            triple(entry.get("mean_response_tokens"), ".1f"),
            triple(entry.get("truncated_fraction"), ".1%"),
            triple(entry.get("format_error"), ".1%"),
            triple(entry.get("repetition"), ".1%"),
        )
        for name, entry in entries.items()
    ]


def significance_rows(run: RunFiles) -> list[tuple[str, ...]]:
    """(set, against whom, student - other with interval, only student, only other, p, test)."""
    if run.retention is None:
        return []
    rows: list[tuple[str, ...]] = []
    for name, entry in run.retention["domains"].items():
        for other in ("teacher", "base"):
            found = (entry.get("tests") or {}).get(f"student_against_{other}")
            if found is None or entry["student"] is None:
                continue
            change = entry["student"] - entry[other]
            text = f"{change:+.3f}"
            if other == "base":
                text = with_interval(change, entry.get("change_ci95"))
            rows.append((name, other, text, *_significance_cells(found)))
    for name, entry in run.retention.get("forgetting", {}).items():
        found = (entry.get("tests") or {}).get("student_against_base")
        if found is not None:
            text = with_interval(entry["forgetting"], entry["ci95"])
            rows.append((name, "base", text, *_significance_cells(found)))
    return rows


def _significance_cells(found: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return str(found["better"]), str(found["worse"]), p_value(found["p"]), str(found["test"])


def p_value(p: float) -> str:
    """``0.22``, ``3.1e-05``, ``< 1e-12``."""
    return "< 1e-12" if p < 1e-12 else f"{p:.2g}"


def heat_map(run: RunFiles) -> dict[str, Any] | None:
    """Every model on every set, coloured by its change against the base."""
    if run.evaluation is None or not run.evaluation.get("table"):
        return None
    table: dict[str, dict[str, Record]] = run.evaluation["table"]
    columns = list(dict.fromkeys(d for cells in table.values() for d in cells))
    teacher_of = run.evaluation.get("teacher_of", {})
    router = run.evaluation.get("router") or {}
    rows = []
    for model, cells in table.items():
        row = [_heat_cell(cells.get(d), teacher_of.get(d) == model) for d in columns]
        rows.append((model, row, number((router.get("models") or {}).get(model))))
    return {
        "columns": columns,
        "rows": rows,
        "router": router.get("router"),
        "best_single": router.get("best_single"),
    }


def _heat_cell(cell: Mapping[str, Any] | None, own: bool) -> dict[str, str]:
    if cell is None or cell.get("score") is None:
        return {"text": NONE, "change": "", "css": "", "strength": "0", "title": "not answered"}
    change = cell.get("change")
    title = f"{with_interval(cell['score'], cell.get('ci95'))}, n = {cell.get('n')}"
    found = {"text": number(cell["score"]), "change": "", "css": "", "strength": "0"}
    if change is not None:
        found["change"] = f"{change:+.3f}"
        found["css"] = "heat " + ("up" if change > 0 else "down" if change < 0 else "")
        found["strength"] = f"{0.65 * min(1.0, abs(change) / FULL_COLOUR):.2f}"
        title += f"; change {with_interval(change, cell.get('change_ci95'))}"
    if own:
        found["css"] += " own"
    return {**found, "title": title}


def divergence_rows(run: RunFiles) -> list[tuple[str, ...]]:
    """(domain, k1 with interval, k3 with interval, answers, tokens)."""
    found = (run.evaluation or {}).get("divergence") or {}
    return [
        (
            name,
            with_interval(entry["k1"], entry["k1_ci95"]),
            with_interval(entry["k3"], entry["k3_ci95"]),
            str(entry["answers"]),
            str(entry["tokens"]),
        )
        for name, entry in found.items()
    ]


def sampled_rows(run: RunFiles) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(columns, rows) of mean@n and pass@k by model and set; no rows where none was sampled."""
    found = (run.evaluation or {}).get("sampled") or {}
    ks = list(dict.fromkeys(k for sets in found.values() for e in sets.values() for k in e["pass"]))
    counts = {e["n_samples"] for sets in found.values() for e in sets.values()}
    columns = ("model", "set", f"mean@{max(counts, default=0)}", *(f"pass@{k}" for k in ks))
    rows: list[tuple[str, ...]] = []
    for model, sets in found.items():
        for name, entry in sets.items():
            cells = [entry["mean"], *(entry["pass"].get(k) for k in ks)]
            texts = [NONE if c is None else with_interval(c["value"], c["ci95"]) for c in cells]
            rows.append((model, name, *texts))
    return columns, rows


def cost_rows(run: RunFiles) -> list[tuple[str, ...]]:
    """(stage, seconds, reserved seconds, share, reserved seconds a point), then the sum.

    Reserved: wall seconds of the stage times the GPUs of the processes that work in it, or their
    cores where the run has no GPU. A point is one hundredth of the mean score over the domains,
    student - base; stages that overlap (scoring begins while sampling goes on) count where the
    loop waited for them.
    """
    sums = {name: math.fsum(v for _, v in run.curve(f"time/{name}_s")) for name in stages(run)}
    reserved = {name: seconds * _units(run, name) for name, seconds in sums.items()}
    total = math.fsum(reserved.values())
    if total <= 0:
        return []
    points = points_gained(run)

    def a_point(value: float) -> str:
        return f"{value / points:.1f}" if points is not None and points > 0 else NONE

    rows: list[tuple[str, ...]] = [
        (name, f"{sums[name]:.0f}", f"{value:.0f}", f"{value / total:.1%}", a_point(value))
        for name, value in reserved.items()
    ]
    rows.append(("all", f"{math.fsum(sums.values()):.0f}", f"{total:.0f}", "", a_point(total)))
    return rows


def cost_facts(run: RunFiles) -> str:
    """One sentence: points gained and tokens a point."""
    points = points_gained(run)
    tokens = math.fsum(v for _, v in run.curve("tokens"))
    if points is None or points <= 0 or tokens <= 0:
        return ""
    return f"{points:.1f} points gained; {tokens / points:,.0f} trained response tokens a point."


def points_gained(run: RunFiles) -> float | None:
    """Mean over the scored domains of student - base, in hundredths; None where nothing was."""
    if run.retention is None:
        return None
    changes = [
        entry["student"] - entry["base"]
        for entry in run.retention["domains"].values()
        if entry["student"] is not None and entry["base"] is not None
    ]
    return 100 * math.fsum(changes) / len(changes) if changes else None


def cost_unit(run: RunFiles) -> str:
    """GPU-seconds where any process of the run has a GPU, else core-seconds."""
    return "GPU-seconds" if _has_gpus(run) else "core-seconds"


def _has_gpus(run: RunFiles) -> bool:
    return any(gpus > 0 for gpus, _ in _reserved(run).values())


def _units(run: RunFiles, stage: str) -> float:
    """GPUs that a stage's processes reserve, or their cores where the run has no GPU at all: the
    two are never added up."""
    gpus, cores = _reserved(run).get(stage, (0.0, 1.0))
    return gpus if _has_gpus(run) else cores


def _reserved(run: RunFiles) -> dict[str, tuple[float, float]]:
    """stage -> (GPUs, cores) of all its processes."""
    config = run.config
    student, rollout = config.get("student") or {}, config.get("rollout") or {}
    layout = student.get("parallel") or {}
    ranks = math.prod(int(layout.get(k) or 1) for k in ("dp", "tp", "pp"))
    train = _process(ranks, student.get("gpus_per_rank"), student.get("threads_per_rank"))
    engines = int(rollout.get("engines") or 1)
    generate = _process(engines, rollout.get("gpus_per_engine"), rollout.get("threads_per_engine"))
    started = [t for t in (config.get("teachers") or {}).values() if not t.get("endpoints")]
    score = [
        _process(int(t.get("replicas") or 1), t.get("gpus"), t.get("threads")) for t in started
    ]
    return {
        "generate": generate,
        "score": (sum(gpus for gpus, _ in score), sum(cores for _, cores in score)),
        "train": train,
        "sync": (train[0] + generate[0], train[1] + generate[1]),
    }


def _process(count: int, gpus: float | None, threads: int | None) -> tuple[float, float]:
    return count * float(gpus or 0), count * float(threads or 1)


def failure_rows(run: RunFiles) -> list[tuple[str, int, int]]:
    """(cause, samples lost, steps in which that happened) from the metrics ``failures/CAUSE``."""
    rows: dict[str, tuple[int, int]] = {}
    for record in run.metrics:
        for key, value in record.items():
            if key.startswith("failures/") and key != "failures/fraction" and value:
                lost, steps = rows.get(key[len("failures/") :], (0, 0))
                rows[key[len("failures/") :]] = (lost + int(value), steps + 1)
    return [(cause, lost, steps) for cause, (lost, steps) in sorted(rows.items())]
