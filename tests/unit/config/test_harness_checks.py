"""Keys of lm-evaluation-harness sets: what goes with what."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.config import load_config
from mopd.config.checks import check_config

SET = "evaluation.general.gsm.prompts.lm_eval=gsm8k"
JUDGE = "evaluation.general.gsm.verifier=lm_eval"


def problems(place: Path, *overrides: str) -> str:
    return "\n".join(check_config(load_config([place / "good.yaml"], list(overrides))))


def test_a_task_judged_by_itself_is_right(place: Path) -> None:
    assert problems(place, SET, JUDGE) == ""
    more = ("evaluation.general.gsm.prompts.fewshot=3", "evaluation.general.gsm.items=50")
    assert problems(place, SET, JUDGE, *more) == ""


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ((SET,), "judged by itself: lm_eval"),
        ((SET, "evaluation.general.gsm.verifier=exact_match"), "judged by itself: lm_eval"),
        ((SET, JUDGE, "evaluation.general.gsm.prompts.jsonl=math.jsonl"), "both jsonl and lm_eval"),
        ((SET, JUDGE, "evaluation.general.gsm.prompts.size=5"), "prompts.size has no effect"),
        ((SET, JUDGE, "evaluation.general.gsm.prompts.lm_eval_folder=no"), "no such folder: no"),
        (("domains.math.prompts.fewshot=2",), "fewshot goes with lm_eval"),
        (("domains.math.verifier=lm_eval",), "math.prompts.lm_eval names none"),
        (
            ("domains.math.prompts={jsonl: null, lm_eval: gsm8k}", "domains.math.verifier=lm_eval"),
            "lm_eval is a test set and is never trained on",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    place: Path, overrides: tuple[str, ...], part: str
) -> None:
    assert part in problems(place, *overrides)
