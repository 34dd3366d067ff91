"""Saving and resuming training: weights, Adam's moments and count, random state.

Everything is stored whole, under Hugging Face names: `model.safetensors` (float32 where the
optimizer keeps float32 copies), `exp_avg.safetensors`, `exp_avg_sq.safetensors`, `rng.safetensors`
and `state.json`. So a run can go on at any parallel layout, and the weights can be read by anyone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.errors import ModelError
from mopd.student import parallel
from mopd.student.files import recover, replace_directory, write_tensors, write_text
from mopd.student.optimizer import MOMENTS, Optimizer
from mopd.student.weights import SafetensorsFolder, ShardedWeights

WEIGHTS, RNG, STATE = "model.safetensors", "rng.safetensors", "state.json"
FORMAT = 1


def save(
    directory: Path,
    weights: ShardedWeights,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    identity: Mapping[str, Any],
    further: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """Collective. `parameters`: this rank's, in the precision the optimizer keeps them.
    `further`: file name -> tensors that every rank holds alike.

    Written beside `directory` and renamed: an interrupted save leaves the previous one whole.
    `identity` is what `load` will insist on. Raises ModelError where it cannot be written.
    """
    temporary = directory.with_name(f".{directory.name}.partial")
    what = f"could not save the student under {directory}"
    state = {"format": FORMAT, "optimizer_steps": optimizer.steps, **identity}

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        for name, tensors in (further or {}).items():
            write_tensors(tensors, temporary / name)
        # No step draws random numbers (dropout is 0); kept so that one which did would resume.
        write_tensors({"cpu": torch.get_rng_state()}, temporary / RNG)
        write_text(json.dumps(state, indent=2) + "\n", temporary / STATE)
        replace_directory(temporary, directory)

    parallel.on_rank_zero(begin, what)
    weights.write(parameters, temporary / WEIGHTS)
    for moment, tensors in optimizer.moments().items():
        weights.write(tensors, temporary / f"{moment}.safetensors")
    parallel.on_rank_zero(finish, what)


def load(
    directory: Path,
    weights: ShardedWeights,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    identity: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Collective. Everything is checked before anything is changed.

    Raises ModelError for a checkpoint that is not there, not whole, or of another model.
    """
    parallel.on_rank_zero(lambda: recover(directory), f"could not read {directory}")
    state = _read_state(directory, {"format": FORMAT, **identity})
    source = SafetensorsFolder(directory / WEIGHTS)
    source.check(shapes)
    trained = _trained_names(weights, optimizer)
    moment_sources = {m: SafetensorsFolder(directory / f"{m}.safetensors") for m in MOMENTS}
    for moment_source in moment_sources.values():
        moment_source.check({name: s for name, s in shapes.items() if name in trained})
    random_state = SafetensorsFolder(directory / RNG).get("cpu")

    weights.load(source, parameters)
    optimizer.adopt_main(parameters)
    moments = {
        moment: {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        for moment, tensors in optimizer.moments().items()
    }
    for moment, tensors in moments.items():
        weights.load(moment_sources[moment], tensors)
    optimizer.restore(state["optimizer_steps"], moments)
    torch.set_rng_state(random_state)
    dist.barrier()


def _trained_names(weights: ShardedWeights, optimizer: Optimizer) -> set[str]:
    """Hugging Face names of what any rank trains."""
    mine = {hf for name in optimizer.trained() for hf in weights.names(name)}
    everywhere: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, mine)
    return set().union(*everywhere)


def _read_state(directory: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    try:
        state = json.loads((directory / STATE).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{directory}: not a student checkpoint ({error}). Expected the folder that "
            "StudentRank.save wrote."
        ) from error
    for key, expected in identity.items():
        if state.get(key) != expected:
            raise ModelError(
                f"{directory}: the checkpoint's {key} is {state.get(key)!r}, this run's is "
                f"{expected!r}. Resume with the configuration it was written with."
            )
    return state
