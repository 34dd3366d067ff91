"""Every YAML file that is shipped loads: runs alone, parts of a run on top of the quickstart."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from mopd.config import load_config
from mopd.config.checks import check_config
from mopd.config.schema import Config

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
RECIPES = (
    "reinforce rloo grpo dr_grpo dapo cispo gspo gspo_token sapo agapo agapo_k_exaone kimi "
    "kimi_curriculum maxrl dppo_tv dppo_kl dppo_topk scalerl mopd mopd_no_orm mopd_topk mopd_full "
    "open_mopd open_mopd_gap orm_only ppo seqkd"
).split()
"""One or more for each system of the objectives' table."""


@cache
def loaded(file: Path) -> Config:
    """A run alone; configs/recipes/ and the like on top of the quickstart, to which they add."""
    return load_config([file] if file.parent == ROOT / "configs" else [QUICKSTART, file])


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(ROOT)))
def test_it_loads(file: Path) -> None:
    loaded(file)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_run_and_says_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = ROOT / "configs" / "recipes" / f"{name}.yaml"
    config = loaded(file)
    assert check_config(config) == []
    head = file.read_text().partition("\nobjective:")[0].replace("\n# ", " ")
    assert head.startswith("# ") and "Left out: " in head
    assert "arXiv" in head or "Williams 1992" in head
    # From outcome rewards alone, or with the teachers' opinion first: nothing in between.
    distils = "mopd" in name or name == "gspo_token"
    objective = config.objective
    assert (objective.teacher.weight, objective.orm.alpha >= 1) == (float(distils), not distils)


def test_every_recipe_is_listed() -> None:
    assert sorted(file.stem for file in (ROOT / "configs" / "recipes").iterdir()) == sorted(RECIPES)
