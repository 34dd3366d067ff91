"""Every recipe on the quickstart's models, all parts real: 20 steps of finite, moving metrics."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from mopd_process import QUICKSTART, ROOT, json_lines, run_mopd

RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
STEPS = 20
SMALL = [
    f"train.steps={STEPS}",
    "evaluation.every=0",
    "train.prompts_per_step=24",
    "evaluation.bootstrap=200",
    *(f"domains.{domain}.held_out=40" for domain in ("backward", "rotate", "caesar")),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_trains(recipe: Path, tmp_path: Path) -> None:
    run_mopd(
        ["train", QUICKSTART, str(recipe), f"run_dir={tmp_path}", f"name={recipe.stem}", *SMALL],
        tmp_path / "log",
        timeout_s=900,
    )
    rows = json_lines(tmp_path / recipe.stem / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        bad = {k: v for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        assert not bad, (row["step"], bad)
    for key in ("loss", "grad_norm", "tokens", "domain/backward/reward"):
        assert len({row[key] for row in rows}) > STEPS // 2, key
    assert all(row["grad_norm"] > 0 for row in rows)
    print(recipe.stem, [round(rows[i]["domain/backward/reward"], 3) for i in (0, STEPS - 1)])
