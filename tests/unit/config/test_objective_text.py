"""The objective in words: what runs, with the defaults of what was chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mopd.config import Config, load_config
from mopd.config.objective_text import objective_lines

Load = Callable[..., Config]
ROOT = Path(__file__).resolve().parents[3]


def test_mopd_as_published(loaded: Load) -> None:
    lines = objective_lines(loaded())
    assert lines["teacher"] == "1 x sampled, reverse KL, clipped to +-5 nats"
    assert lines["outcome rewards"] == "no part in them"
    assert lines["loss"] == "mopd"
    assert lines["truncation"] == "icepop on pi/mu, 0.5 to 5"
    assert lines["aggregation"] == "sequence"
    assert "balance" not in lines and "KL" not in lines


def test_what_a_loss_brings_with_it(loaded: Load) -> None:
    lines = objective_lines(
        loaded(
            "objective.loss.name=dapo",
            "objective.truncation.kind=tis",
            "objective.aggregation=token",
            "objective.balance={kind: token_share, targets: {math: 0.25, code: 0.75}}",
            "objective.kl={kind: k2, weight: 0.1}",
            "train.minibatches=2",
            "train.epochs=3",
        )
    )
    assert lines["loss"] == "dapo (clip_low 0.2, clip_high 0.28)"
    assert lines["truncation"] == "tis on pi_old/mu, up to 2"
    assert lines["balance"] == "token_share, targets math 0.25, code 0.75"
    assert lines["KL"] == "k2 x 0.1 toward each sample's own teacher"
    assert lines["a step"].endswith("answers of the student, 6 updates")


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs" / "recipes").glob("*.yaml")))
def test_every_recipe_can_be_told(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = objective_lines(load_config([ROOT / "configs" / "quickstart.yaml", recipe], []))
    assert all(lines.values()) and not any("None" in text for text in lines.values()), lines
