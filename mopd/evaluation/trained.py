"""What it took to train an evaluated model, read from the run that its folder lies in.

A comparison of methods is fair at equal student tokens, so that these stand beside every score; a
model that differs from the student by its seed alone is the same recipe, not another method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import stdev
from typing import Any

from mopd.evaluation.compare import config_differences
from mopd.evaluation.run_files import RunFiles, read_run

NOT_THE_RECIPE = ("name", "seed", "run_dir", "overwrite", "resume", "evaluation", "ray")
"""Keys, or sections, in which runs of one recipe may differ."""


def run_of(folder: Path) -> Path | None:
    """The run that left the checkpoint ``RUN/student`` or ``RUN/best/student``, or None."""
    folder = folder.absolute()
    place = folder.parent.parent if folder.parent.name == "best" else folder.parent
    # A merge of the teachers lies in a run's folder too, and was not trained there.
    ours = folder.name == "student" and (place / "metrics.jsonl").is_file()
    return place if ours and (place / "config.yaml").is_file() else None


def training_of(folder: Path, student: Path | None) -> dict[str, Any] | None:
    """Steps, samples, tokens and seconds of the run behind `folder`; None where there is none.

    Args:
        student: the evaluated student's folder; ``differs`` lists what of the recipe is another
            than there (null where the student's run is not known).
    """
    place = run_of(folder)
    if place is None:
        return None
    run = read_run(place)
    last = _last_step(run, folder)
    done = [record for record in run.metrics if record["step"] <= last]
    reference = None if student is None else run_of(student)
    return {
        "run": run.name,
        "seed": run.config.get("seed"),
        "steps": last,
        "samples": _sum(done, "samples"),
        "tokens": _sum(done, "tokens"),
        "step_seconds": _sum(done, "time/step_s"),
        "differs": None if reference is None else recipe_differences(reference, place),
    }


def recipe_differences(a: Path, b: Path) -> list[str]:
    """``key: A -> B`` where two runs' recipes differ; [] where only name, seed and the like do."""
    return [
        line
        for line in config_differences(a, b)
        if line.partition(":")[0].partition(".")[0] not in NOT_THE_RECIPE
    ]


def _last_step(run: RunFiles, folder: Path) -> int:
    """Steps behind the checkpoint: all, or those until the best student was kept."""
    best = (run.best or {}).get("step")
    return best if folder.parent.name == "best" and isinstance(best, int) else run.steps_done


def _sum(records: list[dict[str, Any]], key: str) -> float | None:
    """Of the metric over the steps; None unless every step has it."""
    values = [record.get(key) for record in records]
    known = [float(v) for v in values if isinstance(v, int | float)]
    return math.fsum(known) if known and len(known) == len(values) else None


# --- what the report makes of it ---


def of_the_same_recipe(evaluation: Mapping[str, Any]) -> list[str]:
    """Further models that differ from the student by their seed alone."""
    models = evaluation.get("models") or {}
    own = (models.get("student") or {}).get("training") or {}
    found = []
    for name in evaluation.get("others") or {}:
        training = (models.get(name) or {}).get("training") or {}
        same = training.get("differs") == [] and training.get("steps") == own.get("steps")
        if same and training.get("seed") != own.get("seed"):
            found.append(name)
    return found


def seed_rows(
    evaluation: Mapping[str, Any], retention: Mapping[str, Any] | None
) -> tuple[tuple[str, ...], list[tuple[str, dict[str, float | None]]]]:
    """(columns, (seed, column -> headroom captured) of every run of the student's recipe, then
    ``mean`` and ``sd`` over them); no rows where there is one seed only.

    The standard deviation is over runs: how far the result depends on chance.
    """
    names = of_the_same_recipe(evaluation)
    if not names or retention is None:
        return (), []
    domains = list(retention["domains"])
    models = evaluation["models"]
    rows: list[tuple[str, dict[str, float | None]]] = [
        (
            str(models["student"]["training"]["seed"]),
            {
                **{d: retention["domains"][d]["headroom_captured"] for d in domains},
                "mean": retention["mean_headroom_captured"],
            },
        )
    ]
    for name in names:
        entry = evaluation["others"][name]
        captured = {d: entry["headroom_captured"].get(d) for d in domains}
        row = {**captured, "mean": entry["mean_headroom_captured"]}
        rows.append((str(models[name]["training"]["seed"]), row))
    columns = (*domains, "mean")
    means: dict[str, float | None] = {}
    spreads: dict[str, float | None] = {}
    for column in columns:
        values = [row[column] for _, row in rows]
        known = [v for v in values if v is not None]
        complete = len(known) == len(values)
        means[column] = math.fsum(known) / len(known) if complete else None
        spreads[column] = stdev(known) if complete else None
    return columns, [*rows, ("mean", means), ("sd", spreads)]
