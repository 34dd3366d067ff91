"""The same numbers at layouts of four ranks, every family, both ways of clipping: C21, C31, C35."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "student")]

from student_harness import Context, launch, require_passed  # noqa: E402
from student_tiny import make_checkpoint, make_samples  # noqa: E402
from test_student_layouts import RESUME, SMOOTH, assert_same, compare, set_up_reference  # noqa: E402

pytestmark = pytest.mark.slow

KINDS = ("moe", "mixtral", "deepseek", "llama3")
DISTRIBUTED = {"optimizer": SMOOTH | {"distributed": True}}


def setup(context: Context) -> None:
    set_up_reference(context, KINDS)


def moe_dp4_ep4(c: Context) -> None:
    compare(c, "moe", {"dp": 4, "ep": 4})


def moe_dp2_tp2_ep2(c: Context) -> None:
    compare(c, "moe", {"dp": 2, "tp": 2, "ep": 2}, **DISTRIBUTED)


def moe_dp2_tp2_ep2_etp2(c: Context) -> None:
    compare(c, "moe", {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, packing=True)


def moe_dp2_tp2_ep4(c: Context) -> None:
    compare(c, "moe", {"dp": 2, "tp": 2, "ep": 4})


def moe_dp2_pp2_ep2(c: Context) -> None:
    compare(c, "moe", {"dp": 2, "pp": 2, "ep": 2}, packing=True, max_tokens_per_microbatch=16)


def moe_tp2_pp2_ep2(c: Context) -> None:
    compare(c, "moe", {"tp": 2, "pp": 2, "ep": 2}, recompute="layers")


def mixtral_dp2_tp2_ep2(c: Context) -> None:
    compare(c, "mixtral", {"dp": 2, "tp": 2, "ep": 2}, packing=True)


def mixtral_dp2_pp2_ep2(c: Context) -> None:
    compare(c, "mixtral", {"dp": 2, "pp": 2, "ep": 2}, **DISTRIBUTED)


def deepseek_dp4_ep2(c: Context) -> None:
    compare(c, "deepseek", {"dp": 4, "ep": 2}, packing=True, **DISTRIBUTED)


def deepseek_dp2_pp2_ep2(c: Context) -> None:
    compare(c, "deepseek", {"dp": 2, "pp": 2, "ep": 2}, recompute="layers")


def llama3_dp2_tp2(c: Context) -> None:
    compare(c, "llama3", {"dp": 2, "tp": 2}, packing=True, **DISTRIBUTED)


def llama3_tp2_pp2(c: Context) -> None:
    # Tied: the first and the last stage hold halves of the same matrix.
    compare(c, "llama3", {"tp": 2, "pp": 2}, max_tokens_per_microbatch=20)


def resume_elsewhere(c: Context) -> None:
    """What four ranks with a distributed optimizer wrote goes on at other layouts of four."""
    options = {"optimizer": RESUME["optimizer"] | {"distributed": True}}
    expected = None
    for layout, distributed in (
        ({"dp": 2, "tp": 2, "ep": 2}, True),
        ({"dp": 4, "ep": 2}, True),
        ({"tp": 2, "pp": 2}, False),
        ({"dp": 2, "pp": 2, "ep": 2}, True),
    ):
        student = c.student("mixtral", parallel=layout, **(options if distributed else RESUME))
        if expected is None:
            for step in range(2):
                student.step(make_samples(5, seed=step), step)
            student.save(c.folder / "half")
        else:
            student.load(c.folder / "half")
        for step in range(2, 4):
            student.step(make_samples(5, seed=step), step)
        weights = student.weights.collect(student._parameters())
        student.close()
        if c.rank == 0:
            expected = expected or weights
            assert_same(weights, expected, str(layout))
        else:
            expected = {}


CASES = [
    moe_dp4_ep4,
    moe_dp2_tp2_ep2,
    moe_dp2_tp2_ep2_etp2,
    moe_dp2_tp2_ep4,
    moe_dp2_pp2_ep2,
    moe_tp2_pp2_ep2,
    mixtral_dp2_tp2_ep2,
    mixtral_dp2_pp2_ep2,
    deepseek_dp4_ep2,
    deepseek_dp2_pp2_ep2,
    llama3_dp2_tp2,
    llama3_tp2_pp2,
    resume_elsewhere,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("student_four_ranks")
    for kind in KINDS:
        make_checkpoint(path / kind, kind)
    launch(4, path, CASES, setup)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_four_ranks(folder: Path, case: Any) -> None:
    require_passed(folder, case, world=4)
