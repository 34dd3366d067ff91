"""Every YAML file that is shipped loads: runs alone, parts of a run on top of the quickstart."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.config import load_config

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(ROOT)))
def test_it_loads(file: Path) -> None:
    if file.parent == ROOT / "configs":
        load_config([file])
    else:  # configs/domains/, configs/teachers/: they add to a run
        load_config([QUICKSTART, file])
