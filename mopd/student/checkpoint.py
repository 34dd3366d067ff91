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
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mopd.errors import ModelError
from mopd.student import megatron_format, megatron_writing, parallel, random_state
from mopd.student.files import (
    recover,
    replace_directory,
    tree_to_disk,
    write_tensors,
    write_text,
)
from mopd.student.optimizer import MOMENTS, Optimizer
from mopd.student.tensor_files import SafetensorsFolder
from mopd.student.weights import ShardedWeights

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
    kind = "huggingface" if megatron is None else "megatron"
    beside = _Beside(directory, optimizer, kind, identity, further or {})
    if megatron is None:
        weights.write(parameters, beside.temporary / WEIGHTS)
        for moment in MOMENTS:
            weights.write(optimizer.moment(moment), beside.temporary / f"{moment}.safetensors")
    else:
        everything = megatron_format.groups(parameters, optimizer.moments())
        megatron_writing.save(megatron, everything, beside.temporary / MEGATRON)

    def write() -> None:
        beside.write()
        beside.put_in_place()

    parallel.on_rank_zero(write, beside.could_not)


class BackgroundSave:
    """`save` in Megatron's format that lets the rank go on while a thread of it writes.

    Every rank copies what it will write, in the machine's memory, before this returns. A thread
    and no process: forks beside gRPC's threads do not end well. It is a daemon, so that a rank
    that is told to end does; what it wrote until then is no checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        identity: Mapping[str, Any],
        further: Mapping[str, Mapping[str, Tensor]],
        model: Any,
        live: Iterable[Tensor],
    ) -> None:
        """Collective. As for `save`; `live`: every tensor that a step of this rank writes to.

        Raises ModelError where the folder cannot be made.
        """
        self._beside = _Beside(directory, optimizer, "megatron", identity, further)
        everything = megatron_format.groups(parameters, optimizer.moments())
        self._tensors = megatron_writing.Writing(
            model, everything, self._beside.temporary / MEGATRON
        )
        self._tensors.snapshot(live)
        self._failure: str | None = None
        self._took_s = 0.0
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        self._tensors.run()
        if dist.get_rank() == 0:
            try:
                self._beside.write()
            except Exception as error:  # whatever it is, `finish` must know
                self._failure = str(error) or type(error).__name__
        self._took_s = time.monotonic() - began

    def written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return not self._thread.is_alive()

    def finish(self) -> float:
        """Wait for all ranks' threads and put the checkpoint in its place; returns the seconds
        that the slowest took. Collective.

        Raises ModelError, on every rank, where one of them could not write; the checkpoint that
        was in the place before is still there.
        """
        self._thread.join()
        self._tensors.finish(self._failure)
        parallel.on_rank_zero(self._beside.put_in_place, self._beside.could_not)
        took = [0.0] * dist.get_world_size()
        dist.all_gather_object(took, self._took_s)
        return max(took)


class _Beside:
    """What a checkpoint has beside its tensors, as it is now, and the folder it grows in."""

    def __init__(
        self,
        directory: Path,
        optimizer: Optimizer,
        kind: str,
        identity: Mapping[str, Any],
        further: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        """Make an empty folder. Collective. Raises ModelError where it cannot be made."""
        self._directory, self._further = directory, further
        self.temporary = directory.with_name(f".{directory.name}.partial")
        self.could_not = f"could not save the student under {directory}"
        self._state = {
            "format": FORMAT,
            "tensors": kind,
            "optimizer_steps": optimizer.steps,
            "layout": parallel.layout(),
            **identity,
        }
        self._random = random_state.gather()

        def begin() -> None:
            shutil.rmtree(self.temporary, ignore_errors=True)
            (self.temporary / MEGATRON if kind == "megatron" else self.temporary).mkdir(
                parents=True
            )

        parallel.on_rank_zero(begin, self.could_not)

    def write(self) -> None:
        """On rank 0. Raises OSError."""
        for name, tensors in self._further.items():
            write_tensors(tensors, self.temporary / name)
        write_tensors(self._random, self.temporary / RNG)
        write_text(json.dumps(self._state, indent=2) + "\n", self.temporary / STATE)

    def put_in_place(self) -> None:
        """On rank 0, once every rank has written. Raises OSError."""
        tree_to_disk(self.temporary)
        replace_directory(self.temporary, self._directory)


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
    source = SafetensorsFolder(directory / RNG)
    random = {name: source.get(name) for name in source.shapes}
    random_state.check(random, directory / RNG)
    # Zeros: a row that pads the vocabulary here may be in no checkpoint.
    moments = optimizer.empty_moments()
    if state.get("tensors", "huggingface") == "megatron":
        everything = megatron_format.groups(parameters, moments)
        megatron_format.load(model, everything, directory / MEGATRON)
    else:
        _load_hugging_face(directory, weights, optimizer, parameters, moments, shapes)
    optimizer.adopt_main(parameters)
    optimizer.restore(state["optimizer_steps"], moments)
    random_state.restore(random, same_layout=state.get("layout") == parallel.layout())
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
    if not isinstance(state, dict):
        raise ModelError(f"{directory / STATE}: expected a JSON object, got {state!r:.80}.")
    for key, expected in identity.items():
        if state.get(key) != expected:
            raise ModelError(
                f"{directory}: the checkpoint's {key} is {state.get(key)!r}, this run's is "
                f"{expected!r}. Resume with the configuration it was written with."
            )
    steps, kind = state.get("optimizer_steps"), state.get("tensors", "huggingface")
    if type(steps) is not int or steps < 0 or kind not in ("huggingface", "megatron"):
        raise ModelError(
            f"{directory / STATE}: optimizer_steps {steps!r}, tensors {kind!r}; expected a count, "
            "and huggingface or megatron. The file is damaged: go on from the checkpoint before it."
        )
    return state
