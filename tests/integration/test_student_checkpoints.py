"""What two ranks save comes back: in either format, at other layouts, with the distributed
optimizer, written while training goes on (C35, C36)."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "student")]

from student_harness import Context, launch, require_passed  # noqa: E402
from student_tiny import make_checkpoint, make_samples  # noqa: E402
from test_student_layouts import RESUME, assert_same  # noqa: E402

KINDS = ("moe", "tied", "deepseek")
ADAM: dict[str, Any] = RESUME["optimizer"]
DISTRIBUTED = ADAM | {"distributed": True}


def setup(context: Context) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{context.port()}",
        rank=context.rank,
        world_size=context.world,
    )


def distributed_optimizer_resumes(c: Context) -> None:
    """C35, C36: float32 and bfloat16, to the bit at the same layout; at another it goes on."""
    import torch

    options = {"optimizer": DISTRIBUTED}
    for dtype in ("float32", "bfloat16"):
        layout = {"dp": 2, "ep": 2}
        straight = c.student("moe", parallel=layout, dtype=dtype, **options)
        for step in range(2):
            straight.step(make_samples(5, seed=step), step)
        straight.save(c.folder / f"half_{dtype}")
        straight.step(make_samples(5, seed=2), 2)
        expected = {n: p.clone() for n, p in straight._main_parameters().items()}
        whole = straight.weights.collect(straight._main_parameters())
        straight.close()
        resumed = c.student("moe", parallel=layout, dtype=dtype, **options)
        resumed.load(c.folder / f"half_{dtype}")
        resumed.step(make_samples(5, seed=2), 2)
        for name, tensor in resumed._main_parameters().items():
            assert tensor.equal(expected[name]), (dtype, name)
            assert dtype == "float32" or tensor.dtype is torch.float32 or ".router." in name
        resumed.close()
        other = c.student("moe", parallel={"tp": 2}, dtype=dtype, **RESUME)
        other.load(c.folder / f"half_{dtype}")
        other.step(make_samples(5, seed=2), 2)
        got = other.weights.collect(other._main_parameters())
        other.close()
        if c.rank == 0 and dtype == "float32":
            assert_same(got, whole)


def megatron_checkpoints(c: Context) -> None:
    """C35, C36 in Megatron's format: to the bit at the same layout, to rounding at others, whatever
    the family; a rank that cannot write leaves the checkpoint before it whole."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from mopd.errors import ModelError

    for kind, dtype, layout, others in (
        ("moe", "float32", {"dp": 2, "ep": 2}, ({"tp": 2}, {"pp": 2}, {"tp": 2, "ep": 2})),
        ("moe", "bfloat16", {"dp": 2, "ep": 2}, ()),
        ("tied", "float32", {"tp": 2}, ({"pp": 2},)),  # a padded vocabulary in both stages
        ("deepseek", "float32", {"pp": 2}, ({"dp": 2, "ep": 2},)),  # expert biases
    ):
        options = RESUME | {"dtype": dtype, "checkpoint_format": "megatron"}
        if "dp" in layout:
            options |= {"optimizer": DISTRIBUTED}
        half = c.folder / f"{kind}_{dtype}" / "half"
        straight = c.student(kind, parallel=layout, **options)
        straight.step(make_samples(5), 0)
        straight.save(half)
        straight.step(make_samples(5, seed=1), 1)
        expected = {n: p.clone() for n, p in straight._main_parameters().items()}
        whole = straight.weights.collect(straight._main_parameters())
        if kind == "tied":
            if c.rank == 1:
                filesystem_async.open = _no_space
            with pytest.raises(ModelError, match="rank 1 could not write it .*No space left"):
                straight.save(half)
            if c.rank == 1:
                del filesystem_async.open
        straight.close()
        resumed = c.student(kind, parallel=layout, dtype=dtype, optimizer=options["optimizer"])
        resumed.load(half)
        assert resumed._optimizer.steps == 1
        resumed.step(make_samples(5, seed=1), 1)
        for name, tensor in resumed._main_parameters().items():
            assert tensor.equal(expected[name]), (kind, dtype, name)
        resumed.close()
        for other in others:
            student = c.student(kind, parallel=other, **RESUME)
            student.load(half)
            student.step(make_samples(5, seed=1), 1)
            got = student.weights.collect(student._main_parameters())
            student.close()
            if c.rank == 0:
                assert_same(got, whole, f"{kind} at {other}")
    tied = c.student("tied", parallel={"dp": 2}, **RESUME)
    half = c.folder / "tied_float32" / "half"
    file = half / "megatron" / "__1_0.distcp"
    if c.rank == 0:
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a whole Megatron checkpoint of this run"):
        tied.load(half)
    tied.close()


def _no_space(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def written_beside_training(c: Context) -> None:
    """What comes back, random state included, is to the bit what was there when the save began,
    although nothing was written before two steps more had been made. Until it is whole, the one
    before is; also where a rank cannot write."""
    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from mopd.errors import ModelError

    for name, dtype, layout, optimizer in (
        ("plain", "float32", {"tp": 2, "ep": 2}, ADAM),
        ("copies", "bfloat16", {"dp": 2, "ep": 2}, ADAM),
        ("distributed", "float32", {"dp": 2, "ep": 2}, DISTRIBUTED),
        ("distributed copies", "bfloat16", {"dp": 2, "ep": 2}, DISTRIBUTED),
    ):
        options = {"dtype": dtype, "optimizer": optimizer, "checkpoint_format": "megatron"}
        folder = c.folder / "beside" / name
        student = c.student("moe", parallel=layout, **options)
        student.step(make_samples(5), 0)
        torch.rand(7)  # so that the random state is not a start's
        student.save(folder)
        student.step(make_samples(5, seed=1), 1)
        torch.rand(5)
        previous, expected, whole = _files(folder), _held(student), _whole(student)
        disk = threading.Event()
        filesystem_async.open = partial(_open_when, disk)
        student.begin_save(folder)
        for step in (2, 3):
            student.step(make_samples(5, seed=step), step)
        torch.rand(3)
        assert not student.save_written()
        assert _files(folder) == previous
        now = _held(student)
        for key in ("weights", "exp_avg", "exp_avg_sq", "steps", "random"):
            changed = [n for n in now if n[0] == key and not now[n].equal(expected[n])]
            assert changed, key  # what a leak would be seen by
        disk.set()
        assert student.finish_save() > 0
        assert student.save_written()
        if name == "plain":
            previous = _files(folder)
            filesystem_async.open = _no_space if c.rank == 1 else open
            student.begin_save(folder)
            with pytest.raises(ModelError, match="plain.*: rank 1 could not write it .*No space"):
                student.finish_save()
            assert _files(folder) == previous
        del filesystem_async.open
        student.close()
        again = c.student("moe", parallel=layout, **options)
        again.load(folder)
        _assert_equal(_held(again), expected)
        again.close()
        if name == "distributed":
            other = c.student("moe", parallel={"tp": 2}, **RESUME)
            other.load(folder)
            _assert_equal(_whole(other), whole)
            other.close()


def random_states(c: Context) -> None:
    """Every rank's own state comes back at the same layout; at another, of torch's generator the
    first rank's, and Megatron's as they were seeded. Likewise from a file of one rank's state."""
    import torch
    from megatron.core.tensor_parallel import random
    from safetensors.torch import load_file, save_file

    def tracking(*numbers: int) -> Any:
        """Megatron's own tracker, in place of the one without states that a CPU is given."""
        tracker = random.CudaRNGStatesTracker()
        tracker.set_states({"expert": torch.tensor(numbers, dtype=torch.uint8)})
        return tracker

    def saved_and_loaded(layout: dict[str, int]) -> tuple[Any, Any]:
        student = c.student("moe", parallel=layout)
        torch.manual_seed(99)
        before, random._CUDA_RNG_STATE_TRACKER = random._CUDA_RNG_STATE_TRACKER, tracking(7, 7)
        student.load(c.folder / "random")
        found = torch.get_rng_state(), random._CUDA_RNG_STATE_TRACKER.get_states()["expert"]
        random._CUDA_RNG_STATE_TRACKER = before
        student.close()
        return found

    student = c.student("moe", parallel={"dp": 2, "ep": 2})
    torch.manual_seed(5 + c.rank)
    mine = torch.get_rng_state()
    before, random._CUDA_RNG_STATE_TRACKER = random._CUDA_RNG_STATE_TRACKER, tracking(3, c.rank)
    student.save(c.folder / "random")
    random._CUDA_RNG_STATE_TRACKER = before
    student.close()
    cpu, tracked = saved_and_loaded({"dp": 2, "ep": 2})
    assert cpu.equal(mine) and tracked.tolist() == [3, c.rank]
    cpu, tracked = saved_and_loaded({"tp": 2})
    torch.manual_seed(5)
    assert cpu.equal(torch.get_rng_state()) and tracked.tolist() == [7, 7]
    if c.rank == 0:
        file = c.folder / "random" / "rng.safetensors"
        save_file({"cpu": load_file(file)["cpu"][1].clone()}, file)
    cpu, tracked = saved_and_loaded({"dp": 2, "ep": 2})
    torch.manual_seed(6)
    assert cpu.equal(torch.get_rng_state()) and tracked.tolist() == [7, 7]


def _open_when(disk: threading.Event, *arguments: Any) -> Any:
    assert disk.wait(60)
    return open(*arguments)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _held(student: Any) -> dict[tuple[str, str], Any]:
    """Copies of what this rank holds: (part, name) -> tensor."""
    import torch

    parts = {"weights": student._main_parameters(), **student._optimizer.moments()}
    return {(p, n): t.detach().clone() for p, ts in parts.items() for n, t in ts.items()} | {
        ("steps", ""): torch.tensor(student._optimizer.steps),
        ("random", ""): torch.get_rng_state(),
    }


def _whole(student: Any) -> dict[tuple[str, str], Any]:
    """The same of all ranks together, by Hugging Face name, on rank 0; what every rank has alike,
    elsewhere."""
    held = _held(student)
    out = {key: held[key] for key in held if key[0] in ("steps", "random")}
    for part in ("weights", "exp_avg", "exp_avg_sq"):
        found = student.weights.collect({n: t for (p, n), t in held.items() if p == part})
        out |= {(part, n): t for n, t in (found or {}).items()}
    return out


def _assert_equal(got: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert got[key].equal(tensor), key


CASES = [
    distributed_optimizer_resumes,
    megatron_checkpoints,
    written_beside_training,
    random_states,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("student_checkpoints")
    for kind in KINDS:
        make_checkpoint(path / kind, kind)
    launch(2, path, CASES, setup)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks_save_and_load(folder: Path, case: Any) -> None:
    require_passed(folder, case, world=2)
