"""The random states of all ranks, as tensors of a checkpoint.

    cpu           [ranks, N] bytes of torch's generator
    cuda          [ranks, N] bytes of the GPU's, where there are GPUs
    tracked.NAME  [ranks, N] bytes of each of Megatron's (of data, tensor and expert parallelism)

No step draws random numbers (dropout is 0); they are kept so that one which did would go on as if
it had not been interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.errors import ModelError
from mopd.student import cpu_platform


def gather() -> dict[str, Tensor]:
    """What is said above, on rank 0, as it is now; nothing elsewhere. Collective."""
    mine = {"cpu": torch.get_rng_state()}
    if not cpu_platform.on_cpu():
        mine["cuda"] = torch.cuda.get_rng_state()
    for name, state in _tracked().items():
        # Graph-safe trackers keep generators, which have the state.
        bytes_N = state.get_state() if isinstance(state, torch.Generator) else state
        mine[f"tracked.{name}"] = bytes_N.cpu()
    every: list[dict[str, Tensor]] | None = None
    if dist.get_rank() == 0:
        every = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(mine, every)
    return {} if every is None else {n: torch.stack([each[n] for each in every]) for n in mine}


def check(saved: Mapping[str, Tensor], where: Path) -> None:
    """Raise ModelError for what `restore` could not set torch's generator to."""
    expected = torch.get_rng_state().numel()
    cpu = saved.get("cpu")
    if cpu is None or cpu.dtype is not torch.uint8 or not cpu.numel() or cpu.shape[-1] != expected:
        got = "nothing" if cpu is None else f"{cpu.dtype} {list(cpu.shape)}"
        raise ModelError(
            f"{where}: cpu is {got}; expected torch.uint8 [ranks, {expected}], the states of "
            "torch's generators. Go on from the checkpoint before it."
        )


def restore(saved: Mapping[str, Tensor], *, same_layout: bool) -> None:
    """Go on from what `gather` gave.

    At another layout a rank has no predecessor: each takes the first one's generator (all are
    seeded alike and draw alike), and Megatron's, which must differ between certain ranks, stay as
    they were seeded.
    """
    cpu = saved["cpu"]
    if cpu.dim() == 1:  # written before every rank's was kept
        cpu, same_layout = cpu[None], False
    # Copies: given a row of a larger tensor, torch reads another place than the row's.
    torch.set_rng_state(cpu[dist.get_rank() if same_layout else 0].clone())
    if not same_layout:
        return
    mine = {n: states[dist.get_rank()].clone() for n, states in saved.items() if n != "cpu"}
    if "cuda" in mine and not cpu_platform.on_cpu():
        torch.cuda.set_rng_state(mine["cuda"])
    tracked = _tracked()
    for name, state in tracked.items():
        kept = mine.get(f"tracked.{name}")
        if kept is None:
            continue  # of a checkpoint that was made on another kind of machine
        if isinstance(state, torch.Generator):
            state.set_state(kept)
        else:
            tracked[name] = kept
    _tracker().set_states(tracked)


def _tracked() -> dict[str, Tensor | torch.Generator]:
    """Megatron's own states by name; none without a GPU."""
    return dict(_tracker().get_states())


def _tracker():  # type: ignore[no-untyped-def]
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
