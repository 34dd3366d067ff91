"""Two runs' students on the same held-out items: `mopd report --compare RUN_A RUN_B`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.table import Table
from rich.text import Text

from mopd.errors import DataError
from mopd.evaluation.metrics import interval, paired_bootstrap, stream
from mopd.evaluation.record_shapes import FinalAnswers, read_json
from mopd.evaluation.run_files import config_file
from mopd.evaluation.significance import paired_test

Scores = Mapping[str, Mapping[str, bool | None]]
"""set -> item id -> right or wrong."""


@dataclass(frozen=True)
class Compared:
    """One set: A's and B's scores on their common items, and whether they differ."""

    name: str
    a: float
    b: float
    change_ci95: Sequence[float | None]
    """Of B - A."""
    p: float
    better: int
    """Items that only B has right."""
    worse: int
    n: int
    left_out: int
    """Items that only one of the two answered, or that were not judged."""


def student_scores(run_dir: Path) -> Scores:
    """The run's final student: from final_answers.json, else its last recorded answers.

    Raises:
        DataError: the folder has neither, or they are damaged.
    """
    final = run_dir / "final_answers.json"
    try:
        if final.exists():
            stored = read_json(final.read_text(), FinalAnswers)
            if "student" not in stored:
                raise DataError(f"{final}: no student was evaluated there")
            return {
                name: {row[0]: row[1] for row in rows} for name, rows in stored["student"].items()
            }
        files = sorted((run_dir / "answers").glob("student-*.json"))
        if not files:
            raise DataError(
                f"{run_dir} has neither final_answers.json nor answers/student-*.json: no student "
                "of it was evaluated"
            )
        stored = json.loads(files[-1].read_text())
        return {n: {i["item_id"]: i["correct"] for i in items} for n, items in stored.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        place = final if final.exists() else files[-1]
        raise DataError(
            f"{place} is damaged ({error}); write it again with mopd evaluate"
        ) from error


def compare_runs(
    a: Path, b: Path, *, replicates: int = 2000, seed: int = 0
) -> tuple[list[Compared], list[str]]:
    """Every set that both students answered, and the configuration keys that differ.

    Raises:
        DataError: a run has no answers, or they have no item in common.
    """
    first, second = student_scores(a), student_scores(b)
    rows = []
    for name in first:
        if name not in second:
            continue
        common = sorted(
            i
            for i, correct in first[name].items()
            if correct is not None and second[name].get(i) is not None
        )
        if not common:
            continue
        values = np.array(
            [[float(first[name][i] or 0), float(second[name][i] or 0)] for i in common]
        )
        means = paired_bootstrap(values, replicates=replicates, seed=stream(seed, name))
        found = paired_test(list(values[:, 1]), list(values[:, 0]), seed=seed)
        rows.append(
            Compared(
                name,
                float(values[:, 0].mean()),
                float(values[:, 1].mean()),
                interval(means[:, 1] - means[:, 0]),
                found["p"],
                found["better"],
                found["worse"],
                len(common),
                len(set(first[name]) | set(second[name])) - len(common),
            )
        )
    if not rows:
        raise DataError(
            f"{a} and {b} have no judged held-out item in common (sets {sorted(first)} and "
            f"{sorted(second)}); they cannot be compared"
        )
    return rows, config_differences(a, b)


def config_differences(a: Path, b: Path) -> list[str]:
    """``key: A -> B`` of every configuration key that differs, in order; a line that says so where
    one of them keeps no configuration."""
    flat = []
    for run_dir in (a, b):
        path = config_file(run_dir)
        flat.append(_flat(yaml.safe_load(path.read_text()), "") if path.exists() else {})
    if without := [str(place) for place, keys in zip((a, b), flat, strict=True) if not keys]:
        return [f"the configurations are not compared: {' and '.join(without)} has none"]
    keys = list(dict.fromkeys([*flat[0], *flat[1]]))
    missing = "(none)"
    return [
        f"{key}: {flat[0].get(key, missing)} -> {flat[1].get(key, missing)}"
        for key in keys
        if flat[0].get(key, missing) != flat[1].get(key, missing)
    ]


def _flat(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {
            k: v for name, each in value.items() for k, v in _flat(each, f"{path}.{name}").items()
        }
    return {path.removeprefix("."): value}


def compare_table(rows: Sequence[Compared], a: str, b: str) -> Table:
    """A rich table of the comparison."""
    table = Table(title=f"{b} against {a}, on common held-out items", title_justify="left")
    for k, column in enumerate(
        ("set", a, b, "change [95%]", "only B right", "only A right", "p", "n")
    ):
        table.add_column(column, justify="left" if k == 0 else "right", no_wrap=True)
    for row in rows:
        low, high = (0.0 if v is None else v for v in row.change_ci95)
        table.add_row(
            Text(row.name),
            f"{row.a:.3f}",
            f"{row.b:.3f}",
            Text(f"{row.b - row.a:+.3f} [{low:+.3f}, {high:+.3f}]"),
            str(row.better),
            str(row.worse),
            f"{row.p:.3g}",
            str(row.n) + (f" ({row.left_out} left out)" if row.left_out else ""),
        )
    return table
