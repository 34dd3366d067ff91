"""Writing a Megatron distributed checkpoint: at once, or from a copy beside what comes next."""

from __future__ import annotations

import contextlib
import inspect
import queue
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mopd.errors import ModelError
from mopd.student import cpu_platform, megatron_format
from mopd.student.megatron_format import Groups


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
        parts, rest = megatron_format.placed(model, tensors)
        with cpu_platform.quiet_build():
            request = dist_checkpointing.save(
                {**parts, **rest}, str(folder), strategy, async_sharded_save=True
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
                f"{self._folder}: could not be written ({megatron_format.first_cause(error)})."
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
