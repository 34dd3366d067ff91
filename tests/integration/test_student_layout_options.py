"""How the student computes may not change what it computes: packing, token budgets, recomputation,
the distributed optimizer and latent attention on two ranks (C21, C23, C31).

One process with padded rows of a fixed count is the reference.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "student")]

from student_harness import Context, launch, require_passed  # noqa: E402
from student_tiny import make_checkpoint, make_samples, with_routes  # noqa: E402
from test_student_layouts import (  # noqa: E402
    SEQUENCES,
    SMOOTH,
    assert_same,
    observe,
    set_up_reference,
)

KINDS = ("moe", "deepseek")
DISTRIBUTED = {"optimizer": SMOOTH | {"distributed": True}}


def setup(context: Context) -> None:
    set_up_reference(context, KINDS)


def same(context: Context, kind: str, layout: dict[str, int], **options: Any) -> None:
    options = {"optimizer": SMOOTH} | options
    student = context.student(kind, parallel=layout, **options)
    seen = observe(student)
    student.close()
    if context.rank == 0:
        assert_same(seen, context.kept[kind])


def packed(c: Context) -> None:
    same(c, "moe", {"dp": 2, "ep": 2}, packing=True)
    same(c, "moe", {"tp": 2, "ep": 2}, packing=True)
    same(c, "moe", {"pp": 2}, packing=True, max_tokens_per_microbatch=20)


def token_budget(c: Context) -> None:
    """C23, C31: ranks with unequal sequences make as many forwards, and one step."""
    same(c, "moe", {"dp": 2, "ep": 2}, max_tokens_per_microbatch=14)
    same(c, "moe", {"dp": 2, "ep": 2}, max_tokens_per_microbatch=14, packing=True)


def recomputed(c: Context) -> None:
    from mopd.student.attention import SelfAttentionCore

    forward, calls = SelfAttentionCore.forward, []

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(self, *args, **kwargs)

    per_step = {}
    SelfAttentionCore.forward = counted  # type: ignore[method-assign]
    for kind in ("none", "attention", "layers"):
        student = c.student("moe", parallel={"tp": 2, "ep": 2}, recompute=kind, micro_batch_size=8)
        calls.clear()
        student.step(make_samples(8), 0)
        per_step[kind] = len(calls)
        student.close()
    SelfAttentionCore.forward = forward  # type: ignore[method-assign]
    assert per_step == {"none": 2, "attention": 4, "layers": 4}
    same(c, "moe", {"tp": 2, "ep": 2}, recompute="layers")
    same(c, "moe", {"pp": 2}, recompute="attention")


def distributed_optimizer(c: Context) -> None:

    same(c, "moe", {"dp": 2}, **DISTRIBUTED)
    same(c, "moe", {"dp": 2, "ep": 2}, **DISTRIBUTED)
    # Each rank holds about half of Adam's state.
    sizes = []
    for distributed in (False, True):
        student = c.student("moe", parallel={"dp": 2}, optimizer={"distributed": distributed})
        student.step(make_samples(4), 0)
        sizes.append(student._optimizer.state_bytes())
        student.close()
    assert 0.4 < sizes[1] / sizes[0] < 0.6, sizes


def latent_attention(c: Context) -> None:
    same(c, "deepseek", {"dp": 2}, packing=True)
    same(c, "deepseek", {"dp": 2, "ep": 2}, packing=True)
    same(c, "deepseek", {"pp": 2})


def replayed_routes(c: Context) -> None:
    """Every layout sends every token where one process sends it (also after recomputation)."""
    samples = with_routes(make_samples(8), layers=2, top_k=2, experts=8)
    seen = {}
    for name, layout, options in (
        ("dp", {"dp": 2}, {}),
        ("dp, packed", {"dp": 2, "ep": 2}, {"packing": True}),
        ("tp", {"tp": 2, "ep": 2}, {"recompute": "layers"}),
        ("tp, packed", {"tp": 2}, {"packing": True}),
        ("pp", {"pp": 2}, {"micro_batch_size": 2}),
    ):
        student = c.student(
            "moe", parallel=layout, routing_replay=True, freeze_routers=False, **options
        )
        seen[name] = student.step(samples, 0), student.logprobs(SEQUENCES, samples=samples)
        student.close()
    for name, (metrics, logprobs) in seen.items():
        assert_same(logprobs, seen["dp"][1], name)
        assert_same(metrics, seen["dp"][0], name)


def no_token_sees_another_sample(c: Context) -> None:
    """Packed logprobs of a sample do not depend on what lies beside it."""
    student = c.student("moe", parallel={"dp": 2}, packing=True, max_tokens_per_microbatch=64)
    together = student.logprobs(SEQUENCES)
    other = [((9,) * len(p), (9,) * len(r)) for p, r in SEQUENCES[1:]]
    changed = student.logprobs([SEQUENCES[0], *other])
    student.close()
    assert together[0] == pytest.approx(changed[0], abs=2e-6)
    assert together[1] != pytest.approx(changed[1], abs=1e-2)


CASES = [
    packed,
    token_budget,
    recomputed,
    distributed_optimizer,
    latent_attention,
    no_token_sees_another_sample,
    replayed_routes,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("student_layout_options")
    for kind in KINDS:
        make_checkpoint(path / kind, kind)
    launch(2, path, CASES, setup)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks_with(folder: Path, case: Any) -> None:
    require_passed(folder, case, world=2)
