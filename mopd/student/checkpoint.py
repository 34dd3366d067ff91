"""Saving and resuming training: weights, Adam's moments and count, random state.

In one of two formats, both of which are gone on from at any parallel layout:

    huggingface  whole tensors under Hugging Face names, which anyone can read: `model.safetensors`
                 (float32 where the optimizer keeps float32 copies), `exp_avg.safetensors`,
                 `exp_avg_sq.safetensors`; written by rank 0
    megatron     `megatron/`, a Megatron distributed checkpoint; every rank writes its own part

and beside them `rng.safetensors` and `state.json`, which says which.
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
from mopd.student import megatron_format, parallel
from mopd.student.files import recover, replace_directory, write_tensors, write_text
from mopd.student.optimizer import MOMENTS, Optimizer
from mopd.student.weights import SafetensorsFolder, ShardedWeights

WEIGHTS, RNG, STATE = "model.safetensors", "rng.safetensors", "state.json"
MEGATRON = "megatron"
"""The folder of the tensors in Megatron's format."""
FORMAT = 1


def save(
    directory: Path,
    weights: ShardedWeights,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    identity: Mapping[str, Any],
    further: Mapping[str, Mapping[str, Tensor]] | None = None,
    *,
    megatron: Any = None,
) -> None:
    """Collective. `parameters`: this rank's, in the precision the optimizer keeps them.
    `further`: file name -> tensors that every rank holds alike.
    `megatron`: this rank's model, for that format; None for the other.

    Written beside `directory` and renamed: an interrupted save leaves the previous one whole.
    `identity` is what `load` will insist on. Raises ModelError where it cannot be written.
    """
    temporary = directory.with_name(f".{directory.name}.partial")
    what = f"could not save the student under {directory}"
    kind = "huggingface" if megatron is None else "megatron"
    state = {
        "format": FORMAT,
        "tensors": kind,
        "optimizer_steps": optimizer.steps,
        **identity,
    }

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary if megatron is None else temporary / MEGATRON).mkdir(parents=True)

    def finish() -> None:
        for name, tensors in (further or {}).items():
            write_tensors(tensors, temporary / name)
        # No step draws random numbers (dropout is 0); kept so that one which did would resume.
        write_tensors({"cpu": torch.get_rng_state()}, temporary / RNG)
        write_text(json.dumps(state, indent=2) + "\n", temporary / STATE)
        replace_directory(temporary, directory)

    parallel.on_rank_zero(begin, what)
    if megatron is None:
        weights.write(parameters, temporary / WEIGHTS)
        for moment in MOMENTS:
            weights.write(optimizer.moment(moment), temporary / f"{moment}.safetensors")
    else:
        everything = megatron_format.groups(parameters, optimizer.moments())
        megatron_format.save(megatron, everything, temporary / MEGATRON)
    parallel.on_rank_zero(finish, what)


def load(
    directory: Path,
    weights: ShardedWeights,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    identity: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    model: Any,
) -> None:
    """Collective. Names and shapes are checked before anything is changed.

    `model`: this rank's, which knows the places of Megatron's tensors.
    Raises ModelError for a checkpoint that is not there, not whole, or of another model.
    """
    parallel.on_rank_zero(lambda: recover(directory), f"could not read {directory}")
    state = _read_state(directory, {"format": FORMAT, **identity})
    random_state = SafetensorsFolder(directory / RNG).get("cpu")
    # Zeros: a row that pads the vocabulary here may be in no checkpoint.
    moments = optimizer.empty_moments()
    if state.get("tensors", "huggingface") == "megatron":
        everything = megatron_format.groups(parameters, moments)
        megatron_format.load(model, everything, directory / MEGATRON)
    else:
        _load_hugging_face(directory, weights, optimizer, parameters, moments, shapes)
    optimizer.adopt_main(parameters)
    optimizer.restore(state["optimizer_steps"], moments)
    torch.set_rng_state(random_state)
    dist.barrier()


def _load_hugging_face(
    directory: Path,
    weights: ShardedWeights,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    moments: Mapping[str, Mapping[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Fill `parameters` and `moments` from whole tensors."""
    source = SafetensorsFolder(directory / WEIGHTS)
    source.check(shapes)
    trained = _trained_names(weights, optimizer)
    moment_sources = {m: SafetensorsFolder(directory / f"{m}.safetensors") for m in MOMENTS}
    for moment_source in moment_sources.values():
        moment_source.check({name: s for name, s in shapes.items() if name in trained})
    weights.load(source, parameters)
    for moment, tensors in moments.items():
        weights.load(moment_sources[moment], tensors)


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
