"""What the kernels' tests share: devices, inputs, the accuracy rule, the measure of memory.

Shapes: N rows, V columns, K listed ids.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mopd.objective.inputs import StepTotals, TokenInputs
from mopd.objective.loss import objective_loss

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
BACKENDS = ["torch", "triton"]
INF = float("inf")

DIRECTIONS = [("reverse", None), ("forward", None), ("jsd", 0.3)]


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Float32 on the CPU, the same for the same arguments."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def far_rows(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """[rows, width] bfloat16 whose rows lie 2^30 elements apart, so that the offsets of the last
    pass 2^31, in a storage of which only the touched pages exist (C25)."""
    if INTERPRETED:  # the interpreter would copy the whole storage onto itself after each launch
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    stride = 2**30
    assert (rows - 1) * stride > 2**31
    storage = torch.empty((rows - 1) * stride + width, dtype=torch.bfloat16, device=DEVICE)
    return storage.as_strided((rows, width), (stride, 1))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference, in float64."""
    return float((got.detach().cpu().double() - want.detach().cpu().double()).abs().max())


def assert_as_accurate(
    got: torch.Tensor, plain: torch.Tensor, want: torch.Tensor, *, floor: float, factor: float = 1.5
) -> None:
    """The accuracy rule: the error against float64 is at most 1.5 times plain torch's in the same
    dtype (and `floor`, for values that plain torch happens to hit exactly)."""
    ours, theirs = error(got, want), error(plain, want)
    assert ours <= factor * theirs + floor, f"error {ours:.3e}, plain torch {theirs:.3e}"


def gradient_factor(backend: str, dtype: torch.dtype) -> float:
    """The interpreter cuts float32 to 16 bits where a GPU rounds to nearest: twice the error, all
    of one sign, which sums over a tile add up."""
    cut = backend == "triton" and INTERPRETED and dtype != torch.float32
    return 3.0 if cut else 1.5


class LargestNewStorage(TorchDispatchMode):
    """The largest storage that torch made while it was active, in float32 elements (4 bytes)."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.largest = max(self.largest, storage.nbytes() // 4)
        return out


def step(logprobs: torch.Tensor) -> torch.Tensor:
    """The objective of two samples of three tokens."""
    student_BT = logprobs.view(2, 3)
    noise = normal(2, 2, 3, seed=3, scale=1.0).to(student_BT.device)
    mask = torch.tensor([[True, True, True], [True, False, False]], device=student_BT.device)
    pytest.importorskip("omegaconf")  # the configuration's own; a bare GPU machine has none
    from mopd.config.objective import ObjectiveConfig

    loss, _ = objective_loss(
        student_BT,
        TokenInputs(
            mask_BT=mask,
            sampler_logprobs_BT=student_BT.detach() + 0.2 * noise[0],
            orm_advantage_B=torch.tensor([0.5, -0.5], device=student_BT.device),
            teacher_logprobs_BT=student_BT.detach() + noise[1],
        ),
        ObjectiveConfig(),
        StepTotals(tokens=4.0, sequences=2.0, prompts=2.0),
    )
    return loss
