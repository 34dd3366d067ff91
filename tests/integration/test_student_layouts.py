"""The same numbers at every parallel layout of two ranks: C21, C22, C26, C30, C31, C35, C36.

One process is the reference, and that is held against transformers in test_student_one_process.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "student"))

from student_harness import Context, launch, require_passed  # noqa: E402
from student_tiny import make_checkpoint, make_samples  # noqa: E402

KINDS = ("moe", "mixed", "dense", "tied")
SAMPLES = make_samples(8)
# Adam divides by |g| + eps: where a gradient is near 0, its rounding would decide the update.
SMOOTH = {"eps": 1e-3}
SEQUENCES = [(s.prompt_ids, s.response_ids) for s in SAMPLES]


def observe(student: Any) -> dict[str, Any]:
    """Everything about a student that must not depend on the layout (tensors on rank 0 only)."""
    student.config.optimizer.clip_grad = 0.0
    seen: dict[str, Any] = {"logprobs": student.logprobs(SEQUENCES)}
    for size in (1, 2, 8):
        student.config.micro_batch_size = size
        seen[f"loss, micro-batch {size}"], _ = student._updates.forward_backward(SAMPLES)
        seen[f"gradients, micro-batch {size}"] = student.gradients()
    student.config.micro_batch_size = 3  # 8 samples do not divide evenly: rows of padding
    metrics = student.step(SAMPLES, 4)
    seen["metrics"] = metrics
    seen["weights"] = student.weights.collect(student._parameters())
    # Adam's first update hardly depends on the gradient's length; its moments do.
    seen["moments"] = student.weights.collect(student._optimizer.moments()["exp_avg"])
    student.config.optimizer.clip_grad = metrics["grad_norm"] / 7
    student.step(SAMPLES, 5)
    seen["moments, clipped"] = student.weights.collect(student._optimizer.moments()["exp_avg"])
    return seen


def assert_same(got: Any, expected: Any, path: str = "", tolerance: float = 5e-6) -> None:
    """Recursively equal; tensors within `tolerance` of the expected tensor's largest value."""
    import torch

    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), path
        for key in expected:
            assert_same(got[key], expected[key], f"{path}/{key}", tolerance)
    elif isinstance(expected, list):
        assert_same(torch.tensor(sum(got, [])), torch.tensor(sum(expected, [])), path, tolerance)
    elif isinstance(expected, torch.Tensor):
        assert got.shape == expected.shape, path
        error = (got - expected).abs().max().item()
        assert error <= tolerance * max(expected.abs().max().item(), 0.1), (path, error)
    else:
        assert got == pytest.approx(expected, rel=1e-5, abs=2e-6), path


def setup(context: Context) -> None:
    set_up_reference(context, KINDS)
    if context.rank == 0:
        import torch

        gradients = context.kept["moe"]["gradients, micro-batch 8"]
        assert not any("mlp.gate." in name for name in gradients)  # frozen
        assert all(g.abs().max() > 0 for n, g in gradients.items() if "experts" not in n)
        norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
        assert context.kept["moe"]["metrics"]["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)


def set_up_reference(context: Context, kinds: tuple[str, ...]) -> None:
    """Rank 0 alone makes the reference of each kind; then all ranks join."""
    import torch.distributed as dist

    if context.rank == 0:
        for kind in kinds:
            student = context.student(kind, world=1, optimizer=SMOOTH)
            context.kept[kind] = observe(student)
            student.close()
    else:
        for _ in kinds:
            context.port()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{context.port()}",
        rank=context.rank,
        world_size=context.world,
    )


def compare(context: Context, kind: str, layout: dict[str, int], **options: Any) -> None:
    from safetensors.torch import load_file

    student = context.student(kind, parallel=layout, **({"optimizer": SMOOTH} | options))
    path = context.folder / "export.safetensors"
    shapes = student.export(path)
    if context.rank == 0:
        source, exported = load_file(context.folder / kind / "model.safetensors"), load_file(path)
        assert exported.keys() == source.keys() == shapes.keys()
        # import -> export returns every bit
        assert all(exported[name].equal(source[name]) for name in source)
    seen = observe(student)
    student.close()
    if context.rank == 0:
        assert_same(seen, context.kept[kind])
    else:
        assert seen["gradients, micro-batch 1"] is None
        assert seen["metrics"]["loss"] != 0.0  # every rank is told


def moe_dp2(c: Context) -> None:
    compare(c, "moe", {"dp": 2})


def moe_dp2_ep2(c: Context) -> None:
    compare(c, "moe", {"dp": 2, "ep": 2})


def moe_tp2(c: Context) -> None:
    # Each rank holds whole experts and shows them half of the tokens (etp 1, ep 1).
    compare(c, "moe", {"tp": 2})


def moe_tp2_etp2(c: Context) -> None:
    compare(c, "moe", {"tp": 2, "etp": 2})


def moe_tp2_ep2(c: Context) -> None:
    compare(c, "moe", {"tp": 2, "ep": 2})


def moe_pp2(c: Context) -> None:
    compare(c, "moe", {"pp": 2})


def mixed_dp2_ep2(c: Context) -> None:
    compare(c, "mixed", {"dp": 2, "ep": 2})


def mixed_pp2(c: Context) -> None:
    # One stage has experts and the other has none.
    compare(c, "mixed", {"pp": 2})


def dense_tp2(c: Context) -> None:
    # C26: the vocabulary lies in two shards of 34 rows, and there are targets in both.
    assert {token // 34 for s in SAMPLES for token in s.response_ids} == {0, 1}
    compare(c, "dense", {"tp": 2})


def dense_pp2(c: Context) -> None:
    compare(c, "dense", {"pp": 2})


def tied_dp2(c: Context) -> None:
    compare(c, "tied", {"dp": 2})


def tied_tp2(c: Context) -> None:
    compare(c, "tied", {"tp": 2})


def tied_pp2(c: Context) -> None:
    # The first and the last stage hold the same matrix.
    compare(c, "tied", {"pp": 2})


def _state(student: Any) -> dict[str, Any]:
    """Copies of this rank's weights and moments."""
    moments = student._optimizer.moments()
    return {
        "weights": {n: p.detach().clone() for n, p in student.model.named_parameters()},
        **{k: {n: t.clone() for n, t in v.items()} for k, v in moments.items()},
        "steps": student._optimizer.steps,
    }


def _assert_identical(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["steps"] == b["steps"]
    for part in a.keys() - {"steps"}:
        assert a[part].keys() == b[part].keys()
        for name in a[part]:
            assert a[part][name].equal(b[part][name]), (part, name)


def masked_everywhere(c: Context) -> None:
    """C22: nothing live in the step, on one rank, or in one micro-batch."""
    band = {"truncation": {"kind": "icepop"}}
    student = c.student("moe", parallel={"dp": 2, "ep": 2}, objective=band, micro_batch_size=1)
    logprobs = student.logprobs(SEQUENCES, whole_head=False)
    live = [replace(s, sampler_logprobs=tuple(lp)) for s, lp in zip(SAMPLES, logprobs, strict=True)]
    dead = [replace(s, sampler_logprobs=tuple(x - 200 for x in s.sampler_logprobs)) for s in live]
    student.step(live, 0)  # so that there are moments to keep
    before = _state(student)
    for nothing in ([], dead):
        metrics = student.step(nothing, 1)
        assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0
        assert all(abs(v) < float("inf") for v in metrics.values())
        assert all(not p.main_grad.any() for p in student.model.parameters() if p.requires_grad)
        _assert_identical(_state(student), before)
    # One live sample: the other rank has a row of padding, and no token at all.
    alone, _ = student._updates.forward_backward(live[:1])
    gradients = student.gradients()
    # A dead sample beside it shares the denominator and nothing else, wherever it is computed.
    halved, _ = student._updates.forward_backward([live[0], dead[1]])
    assert halved == pytest.approx(alone / 2, rel=1e-6)
    half = student.gradients()
    if c.rank == 0:
        assert_same({n: 2 * g for n, g in half.items()}, gradients)
    assert student.step(live[:3] + dead[3:], 1)["grad_norm"] > 0
    student.close()


def routers_stay(c: Context) -> None:
    """C30: three steps with weight decay leave every router as it was, expert bias included, on
    every rank, in the saved and in the exported checkpoint."""
    from safetensors.torch import load_file

    from mopd.student.model import state

    for kind, expected in (("moe", ["weight"] * 2), ("deepseek", ["expert_bias", "weight"])):
        student = c.student(
            kind,
            parallel={"dp": 2, "ep": 2},
            optimizer={"weight_decay": 0.1, "lr": 1e-2, "clip_grad": 1.0},
            router_bias_update_rate=1e-2,  # freezing has the last word
        )
        routers = {n: p for n, p in state(student.model).items() if ".router." in n}
        before = {n: p.detach().clone() for n, p in routers.items()}
        assert sorted(n.rpartition(".")[2] for n in before) == expected
        assert all(p.any() for p in before.values())
        for step in range(3):
            # All tokens to the same few experts: what a load balancer would push against.
            same = replace(SAMPLES[0], sample_id=f"x{step}")
            student.step([same, *SAMPLES[1:3]], step)
        assert all(p.equal(before[n]) for n, p in routers.items())
        assert student.model.config.moe_aux_loss_coeff == 0  # the checkpoint's config says 0.5
        student.export(c.folder / "trained.safetensors")
        student.save(c.folder / kind / "trained")
        student.close()
        if c.rank == 0:
            source = load_file(c.folder / kind / "model.safetensors")
            saved = c.folder / kind / "trained" / "model.safetensors"
            for file in (c.folder / "trained.safetensors", saved):
                trained = load_file(file)
                for name, tensor in source.items():
                    if ".gate." in name:
                        assert trained[name].equal(tensor), name
                    elif "embed" not in name:
                        assert not trained[name].equal(tensor), name  # the rest did move


RESUME = {"optimizer": {"lr": 3e-3, "min_lr": 1e-4, "warmup_steps": 2, "clip_grad": 0.5} | SMOOTH}


def _steps(student: Any, first: int, last: int) -> None:
    for step in range(first, last):
        student.step(make_samples(5, seed=step), step)


def resume_same_layout(c: Context) -> None:
    """C36: 2 steps, resume, 2 steps == 4 steps, to the bit."""
    layout = {"dp": 2, "ep": 2}
    straight = c.student("moe", parallel=layout, **RESUME)
    _steps(straight, 0, 2)
    straight.save(c.folder / "half")
    _steps(straight, 2, 4)
    expected = _state(straight)
    c.kept["expected"] = straight.weights.collect(dict(straight.model.named_parameters()))
    straight.close()
    resumed = c.student("moe", parallel=layout, **RESUME)
    resumed.load(c.folder / "half")
    assert resumed._optimizer.steps == 2
    _steps(resumed, 2, 4)
    _assert_identical(_state(resumed), expected)
    resumed.close()


def resume_other_layouts(c: Context) -> None:
    """C35, C36: what dp 2 with ep 2 wrote goes on at tp 2, at pp 2 and at tp 2 with ep 2."""
    for layout in ({"tp": 2}, {"pp": 2}, {"tp": 2, "ep": 2}):
        student = c.student("moe", parallel=layout, **RESUME)
        student.load(c.folder / "half")
        _steps(student, 2, 4)
        weights = student.weights.collect(student._parameters())
        student.close()
        if c.rank == 0:
            assert_same(weights, c.kept["expected"], str(layout))


def resume_in_one_process(c: Context) -> None:
    """The same, in one process."""
    import torch.distributed as dist

    dist.destroy_process_group()
    if c.rank == 0:
        student = c.student("moe", world=1, **RESUME)
        student.load(c.folder / "half")
        _steps(student, 2, 4)
        assert_same(student.weights.collect(student._parameters()), c.kept["expected"])
        student.close()


CASES = [
    moe_dp2,
    moe_dp2_ep2,
    moe_tp2,
    moe_tp2_etp2,
    moe_tp2_ep2,
    moe_pp2,
    mixed_dp2_ep2,
    mixed_pp2,
    dense_tp2,
    dense_pp2,
    tied_dp2,
    tied_tp2,
    tied_pp2,
    masked_everywhere,
    routers_stay,
    resume_same_layout,
    resume_other_layouts,
    resume_in_one_process,  # last: it leaves the process group
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("student_layouts")
    for kind in (*KINDS, "deepseek"):
        make_checkpoint(path / kind, kind)
    launch(2, path, CASES, setup)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(folder: Path, case: Any) -> None:
    require_passed(folder, case, world=2)
