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
import inspect
import queue
import shutil
from collections.abc import Iterable, Iterator, Mapping
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


class Writing:
    """A checkpoint on its way to the disk: planned by all ranks, written by each, ended by all.

    With `snapshot` after the plan, the tensors may change before they are written, and `run` may go
    on in a thread while the rank computes: it holds no collective.
    """

    def __init__(self, model: Any, tensors: Groups, folder: Path) -> None:
        """Plan which rank writes what into `folder`, which rank 0 has made. Collective."""
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import (
            get_default_save_sharded_strategy,
        )
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )

        # What data-parallel ranks hold alike is dealt to them, not written by the first.
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(), parallel_state.get_data_parallel_group()
        )
        # Megatron collects the writers' results in a queue of a further process, which outlives a
        # rank that is killed. Ours write in this process, one after the other: no fork beside gRPC
        # threads.
        filesystem_async._results_queue = queue.SimpleQueue()
        sharded, rest = _sharded(model, tensors)
        with cpu_platform.quiet_build():
            request = dist_checkpointing.save(
                {**sharded, **rest}, str(folder), strategy, async_sharded_save=True
            )
        self._folder, self._finalize = folder, list(request.finalize_fns)
        self._failure: str | None = None
        self._buckets: list[Any] = []
        """Per file, what goes into it; none where this rank is the first holder of nothing."""
        if request.async_fn is not None:
            self._transforms = request.async_fn.args[0]
            self._results = request.async_fn_args[2]
            self._buckets = request.preload_fn()  # from a GPU: copies in the machine's memory

    def snapshot(self, live: Iterable[Tensor]) -> None:
        """Copy what is still in the memory of a tensor of `live`: those that a step writes to.

        On a CPU Megatron plans to write the parameters themselves.
        """
        changing = {tensor.untyped_storage().data_ptr() for tensor in live}
        self._buckets = [
            (file, key, (objects, [(item, _outside(changing, tensor)) for item, tensor in data]))
            for file, key, (objects, data) in self._buckets
        ]

    def run(self) -> None:
        """Write and sync this rank's files. What goes wrong is kept for `finish`."""
        try:
            self._write()
        except Exception as error:
            self._failure = str(error) or type(error).__name__
            with contextlib.suppress(OSError):  # torch's words for a full disk are not these
                free = shutil.disk_usage(self._folder).free / 2**20
                self._failure += f"; {free:.0f} MiB are free there"

    def _write(self) -> None:
        """What Megatron's `write_preloaded_data_multiproc` does with a process for each file."""
        from megatron.core.dist_checkpointing.strategies.filesystem_async import (
            FileSystemWriterAsync,
        )

        # Megatron's decorator switches the garbage collector off, for a forked process that must
        # not touch CUDA; here it would be the trainer's.
        write = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)
        written: dict[int, Any] = {}
        for place in range(len(self._buckets)):
            # Gone once it is written: a snapshot need not live longer.
            bucket, self._buckets[place] = self._buckets[place], None
            outcome: queue.Queue[Any] = queue.Queue()
            counter: queue.Queue[int] = queue.Queue()
            counter.put(place)
            write(self._transforms, place, bucket, outcome, counter, use_fsync=True)
            _, written[place] = outcome.get_nowait()
            if isinstance(written[place], Exception):
                raise written[place]
        if written:
            self._results.put(written)

    def finish(self, failure: str | None = None) -> None:
        """After `run`: write what says that the checkpoint is whole. Collective.

        failure: of what else this rank had to write, if something went wrong with that.
        Raises ModelError, on every rank, where one of them could not write.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, self._failure or failure)
        for rank, each in enumerate(failures):
            if each is not None:
                raise ModelError(f"{self._folder}: rank {rank} could not write it ({each}).")
        try:
            for finalize in self._finalize:
                finalize()
        except CheckpointException as error:  # torch's own, which is no Exception
            raise ModelError(
                f"{self._folder}: could not be written ({first_cause(error)})."
            ) from error


def save(model: Any, tensors: Groups, folder: Path) -> None:
    """Write every rank's tensors into `folder`, which rank 0 has made. Collective.

    Raises ModelError, on every rank, where one of them could not write.
    """
    writing = Writing(model, tensors, folder)
    writing.run()
    writing.finish()


def _outside(changing: set[int], tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it if it lies in one of those storages."""
    return tensor.clone() if tensor.untyped_storage().data_ptr() in changing else tensor


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
    return _sharded(model, detached)[0], flat


def _read(sharded: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(sharded, str(folder))
    for name, tensor in tensors.items():
        # Most are read in place; what is stored in pieces (gate and up) is not.
        if loaded[name] is not tensor:
            tensor.copy_(loaded[name])


def _sharded(model: Any, tensors: Groups) -> tuple[dict[str, Any], dict[str, Any]]:
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
