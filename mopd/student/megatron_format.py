"""A run's tensors as a Megatron distributed checkpoint: every rank writes and reads its own part.

Weights lie under Megatron's names, Adam's moments under ``optimizer.state.exp_avg.NAME`` and
``optimizer.state.exp_avg_sq.NAME``, which is where Megatron's own fully sharded optimizer format
has them. Like the weights they hold no layout and are read at any.

What Megatron-Core 0.16.1's optimizers would write themselves is not that: with expert parallelism
the names get a prefix of the chained optimizer, and with the distributed optimizer saving fails on
gloo. But a moment has the shape of its parameter, so the parameter's place in the model's own
`sharded_state_dict` says where it goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.errors import ModelError
from mopd.student import cpu_platform

Groups = Mapping[str, Mapping[str, Tensor]]
"""Prefix of the names -> this rank's tensors by Megatron name, all of a parameter's shape."""

_SHOWN = 8


def groups(
    parameters: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Mapping[str, Tensor]]:
    """The tensors of a checkpoint by prefix."""
    return {"": parameters} | {f"optimizer.state.{m}.": t for m, t in moments.items()}


def load(model: Any, into: Groups, folder: Path) -> None:
    """Fill every rank's tensors from `folder`. Collective.

    Names and shapes are checked before anything is read. Raises ModelError for a folder that is
    not a whole checkpoint of this model.
    """
    with _reading(folder, "run", "Go on from the checkpoint before it."):
        sharded, tensors = _targets(model, into)
        _check(sharded, folder)
        _read(sharded, tensors, folder)


def load_weights(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the weights alone, of a run's checkpoint or of a Megatron program's; in one process,
    whose model has as many rows as its vocabulary.

    Raises ModelError for a folder that is not a whole checkpoint of this model: with a tensor too
    many or too few, in another shape, or with rows of another vocabulary.
    """
    with _reading(folder, "model", "Check that it is whole, and which model it is of."):
        sharded, tensors = _targets(model, {"": weights})
        _check_rows(_check(sharded, folder, passed_over="optimizer."), folder)
        _read(sharded, tensors, folder)


@contextlib.contextmanager
def _reading(folder: Path, whose: str, advice: str) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with cpu_platform.quiet_build(), torch.no_grad():
            yield
    except ModelError:
        raise
    # torch's own is no Exception, and unpickling raises anything.
    except (Exception, CheckpointException) as error:
        raise ModelError(
            f"{folder}: not a whole Megatron checkpoint of this {whose} ({first_cause(error)}). "
            f"{advice}"
        ) from error


def _targets(model: Any, into: Groups) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The tensors to fill, with their places in the whole and as they are, by prefixed name."""
    detached = {p: {n: t.detach() for n, t in tensors.items()} for p, tensors in into.items()}
    flat = {p + n: tensor for p, tensors in detached.items() for n, tensor in tensors.items()}
    return placed(model, detached)[0], flat


def _read(sharded: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(sharded, str(folder))
    for name, tensor in tensors.items():
        # Most are read in place; what is stored in pieces (gate and up) is not.
        if loaded[name] is not tensor:
            tensor.copy_(loaded[name])


def placed(model: Any, tensors: Groups) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the tensors with their places in the whole, what else Megatron keeps of a layer)."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    with cpu_platform.quiet_build():
        places = model.sharded_state_dict()
    out = {}
    for prefix, named in tensors.items():
        for name, tensor in named.items():
            place = places[name]
            changes: dict[str, Any] = {"key": prefix + place.key, "data": tensor}
            if isinstance(place, ShardedTensor):
                changes["dtype"] = tensor.dtype
            out[prefix + name] = replace(place, **changes)
    return out, {n: place for n, place in places.items() if isinstance(place, ShardedObject)}


def _check(
    sharded: Mapping[str, Any], folder: Path, passed_over: str | None = None
) -> dict[str, tuple[int, Any]]:
    """Raise ModelError naming what `folder` has too little, too much, or in another shape.

    passed_over: beginning of the names that may be there.
    Returns, of what is cut by the vocabulary's rows, by name: the rows wanted, and Megatron's
    description of what is there.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    built: dict[str, Any] = dict(sharded)
    apply_factories(built)
    expected: dict[str, tuple[tuple[int, ...], bool]] = {}
    waiting = list(built.values())
    while waiting:  # a factory makes lists or dicts of tensors
        each = waiting.pop()
        if isinstance(each, ShardedTensor):
            expected[each.key] = (tuple(each.global_shape), each.allow_shape_mismatch)
        else:
            waiting += each.values() if isinstance(each, dict) else each
    everywhere: list[dict[str, tuple[tuple[int, ...], bool]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, expected)
    wanted = {key: value for part in everywhere for key, value in part.items()}
    there = dist_checkpointing.load_tensors_metadata(str(folder))
    found = {
        key: tuple(value.global_shape)
        for key, value in there.items()
        if passed_over is None or not key.startswith(passed_over)
    }
    both = wanted.keys() & found.keys()
    problems = []
    for what, names in (
        ("missing", wanted.keys() - found.keys()),
        ("unexpected", found.keys() - wanted.keys()),
        (
            "of another shape",
            {
                f"{key} {list(found[key])} (expected {list(wanted[key][0])})"
                for key in both
                # Rows that pad the vocabulary come and go with tp.
                if wanted[key][0][wanted[key][1] :] != found[key][wanted[key][1] :]
            },
        ),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            problems.append(f"{len(names)} {what}: {', '.join(sorted(names)[:_SHOWN])}{more}")
    if problems:
        raise ModelError(
            f"{folder}: tensors do not fit the model: {'; '.join(problems)}. Nothing was loaded."
        )
    return {key: (wanted[key][0][0], there[key]) for key in both if wanted[key][1]}


def _check_rows(rows: Mapping[str, tuple[int, Any]], folder: Path) -> None:
    """Raise ModelError where an embedding or head is not that of the model's vocabulary, with or
    without rows of 0 that only pad it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for key, (wanted, there) in rows.items():
        found = there.global_shape[0]
        if found > wanted:
            whole = torch.empty(there.global_shape, dtype=there.dtype)
            place = {key: ShardedTensor.from_rank_offsets(key, whole)}
            if not dist_checkpointing.load(place, str(folder))[key][wanted:].any():
                continue
        elif found == wanted:
            continue
        raise ModelError(
            f"{folder}: {key} has {found} rows, the model's vocabulary {wanted}"
            + (", and the rows past those are not 0 as padding is" if found > wanted else "")
            + ". Nothing was loaded."
        )


def first_cause(error: BaseException) -> str:
    """The line of the error that says what happened; torch's begin with a list of ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
