"""One recipe under several seeds: how far its results depend on chance (`mopd report --seeds`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from rich.table import Table
from rich.text import Text

from mopd.errors import DataError
from mopd.evaluation.compare import config_differences
from mopd.evaluation.report import retention_of
from mopd.evaluation.run_files import read_run
from mopd.evaluation.tables import NONE, number

EXPECTED = ("name", "seed", "overwrite", "resume")
"""Keys in which runs of one recipe differ."""


def over_seeds(runs: Sequence[Path]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """(domain or ``mean`` -> values of each run with their mean and sd, other differences).

    The standard deviation is over runs; each run's own interval says what its items allow.

    Raises:
        DataError: fewer than two runs, one is not finished, or they have other domains.
    """
    if len(runs) < 2:
        raise DataError(f"--seeds needs two runs or more, got {len(runs)}")
    results = [retention_of(read_run(run)) for run in runs]
    names = list(results[0]["domains"])
    for run, result in zip(runs, results, strict=True):
        if list(result["domains"]) != names:
            raise DataError(f"{run} has the domains {list(result['domains'])}, {runs[0]} {names}")
    rows: dict[str, dict[str, Any]] = {
        name: {
            key: _spread([result["domains"][name][key] for result in results])
            for key in ("base", "teacher", "student", "retention", "headroom_captured")
        }
        for name in names
    }
    rows["mean"] = {
        "retention": _spread([result["mean_retention"] for result in results]),
        "headroom_captured": _spread([result["mean_headroom_captured"] for result in results]),
    }
    different = [
        f"{run.name} differs from {runs[0].name} in {line}"
        for run in runs[1:]
        for line in config_differences(runs[0], run)
        if line.partition(":")[0] not in EXPECTED
    ]
    return rows, different


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard deviation; None where a run has no value."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return {"values": list(values), "mean": None, "sd": None}
    return {"values": known, "mean": math.fsum(known) / len(known), "sd": stdev(known)}


def seeds_table(rows: dict[str, dict[str, Any]], runs: Sequence[Path]) -> Table:
    """A rich table: mean ± sd of each number, and every run's headroom captured."""
    table = Table(title=f"{len(runs)} runs: mean ± standard deviation", title_justify="left")
    table.add_column("domain", no_wrap=True)
    keys = ("base", "teacher", "student", "retention", "headroom_captured")
    for key in keys:
        table.add_column(key.replace("_", " "), justify="right", no_wrap=True)
    for run in runs:
        table.add_column(run.name, justify="right", no_wrap=True)
    for name, row in rows.items():
        cells = [_cell(row.get(key)) for key in keys]
        each = [number(value) for value in row["headroom_captured"]["values"]]
        table.add_row(*(Text(cell) for cell in (name, *cells, *each)))
    return table


def _cell(spread: dict[str, Any] | None) -> str:
    if spread is None:
        return ""
    if spread["mean"] is None:
        return NONE
    return f"{spread['mean']:.3f} ± {spread['sd']:.3f}"
