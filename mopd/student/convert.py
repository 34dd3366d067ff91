"""`mopd convert`: Hugging Face folders <-> Megatron checkpoints, in one process on the CPU.

Megatron's distributed checkpoints (`torch_dist`) hold no layout: what is written here is read by
Megatron-Core programs at any tensor, pipeline or expert parallelism, and the other way round.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mopd.config.schema import ParallelConfig, StudentConfig
from mopd.errors import ModelError
from mopd.student import (
    checkpoint,
    cpu_platform,
    megatron_format,
    megatron_writing,
    model,
    parallel,
)
from mopd.student.files import replace_directory
from mopd.student.opening import open_checkpoint, read_settings
from mopd.student.save_hf import copy_settings
from mopd.student.tensor_files import SafetensorsFolder
from mopd.student.weights import ShardedWeights

Tick = Callable[[str], None]
"""Called with each tensor's name once it is done."""


def to_megatron(source: Path, out: Path, dtype: str, port: int) -> int:
    """Write a Hugging Face folder as a Megatron distributed checkpoint; returns how many tensors.

    Raises ModelError for a source of another shape than its config's, and where `out` exists or
    cannot be written.
    """
    _require_new(out)
    with _model(source, dtype, port, out) as (built, weights, tensors, partial):
        with progress("read", len(tensors)) as tick:
            weights.load(SafetensorsFolder(source), tensors, tick)
        partial.mkdir(parents=True)
        print(f"writing {out}", flush=True)
        with _watched(partial, sum(tensor.nbytes for tensor in tensors.values())):
            megatron_writing.save(built, {"": tensors}, partial)
        replace_directory(partial, out)
        return len(tensors)


def to_hugging_face(source: Path, out: Path, like: Path, dtype: str, port: int) -> int:
    """Write `source` as a Hugging Face folder with the config and tokenizer of `like`.

    `source`: a Megatron distributed checkpoint, or one of a run (``RUN/checkpoints/step_N``).
    Raises ModelError for a checkpoint of another model than `like`, and where `out` exists or
    cannot be written.
    """
    _require_new(out)
    own = run_checkpoint(source)
    if own is None and not (source / "metadata.json").is_file():
        raise ModelError(
            f"{source}: neither a run's checkpoint (no {checkpoint.STATE} of a student, also not "
            "in student/) nor a Megatron distributed checkpoint (no metadata.json)."
        )
    with _model(like, dtype, port, out) as (built, weights, tensors, partial):
        if own is not None and not (own / checkpoint.MEGATRON).is_dir():
            files = SafetensorsFolder(own / checkpoint.WEIGHTS)
            files.check(open_checkpoint(like)[0].shapes())
            with progress("read", len(tensors)) as tick:
                weights.load(files, tensors, tick)
        else:
            folder = source if own is None else own / checkpoint.MEGATRON
            print(f"reading {folder}", flush=True)
            megatron_format.load_weights(built, tensors, folder)
        copy_settings(like, partial, dtype)
        with progress("write", len(weights.manifest(tensors))) as tick:
            weights.write(tensors, partial / checkpoint.WEIGHTS, tick=tick)
        replace_directory(partial, out)
        return len(tensors)


def run_checkpoint(source: Path) -> Path | None:
    """The student's folder of a run's checkpoint, or None. A step's folder has a state.json of the
    run's own beside it, so that the file alone says nothing."""
    for folder in (source / "student", source):
        weights = (folder / checkpoint.WEIGHTS, folder / checkpoint.MEGATRON)
        if (folder / checkpoint.STATE).is_file() and any(each.exists() for each in weights):
            return folder
    return None


@contextlib.contextmanager
def _model(
    folder: Path, dtype: str, port: int, out: Path
) -> Iterator[tuple[Any, ShardedWeights, Any, Path]]:
    """(Megatron model with random weights, its mapping, its tensors by Megatron name, a place to
    write in that is gone afterwards)."""
    with cpu_platform.quiet_build():  # its imports
        cpu_platform.install()
    config = StudentConfig(model=str(folder), dtype=dtype)
    family, _ = open_checkpoint(folder)
    partial = out.with_name(f".{out.name}.partial")
    before = parallel.start(ParallelConfig(), 0, 1, "127.0.0.1", port, 0)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        built = model.build(family, config, family.vocabulary)
        tensors = model.state(built)
        yield built, ShardedWeights(model.slots(built, family), (0, 1), (0, 1)), tensors, partial
    except OSError as error:
        raise ModelError(f"{out}: could not be written ({error}).") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        parallel.stop(before)


def _require_new(out: Path) -> None:
    if os.path.lexists(out):
        raise ModelError(f"{out} exists already; give another place, or remove it first.")


def dtype_of(folder: Path) -> str:
    """What a Hugging Face folder's config says its weights are kept in."""
    settings = read_settings(folder)
    dtype = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    if dtype not in model.DTYPES:
        raise ModelError(
            f"{folder}: config.json says dtype {dtype!r}; give --dtype, one of "
            f"{', '.join(model.DTYPES)}."
        )
    return dtype


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Tick]:
    """A bar on a terminal, a line at every tenth elsewhere."""
    if sys.stdout.isatty():
        from rich.progress import Progress

        with Progress() as bar:
            task = bar.add_task(what, total=total)
            yield lambda _: bar.advance(task)
        return
    done = 0

    def line(name: str) -> None:
        nonlocal done
        done += 1
        if done == total or done * 10 // total > (done - 1) * 10 // total:
            print(f"{what} {done}/{total}: {name}", flush=True)

    yield line


@contextlib.contextmanager
def _watched(folder: Path, total: int) -> Iterator[None]:
    """Progress by how many of `total` bytes lie in `folder`, which Megatron writes in one call."""
    ended, told = threading.Event(), 0
    with progress("write", 10) as tick:

        def tell(tenths: int) -> None:
            nonlocal told
            while told < tenths:
                told += 1
                tick(f"of {total / 2**20:.1f} MiB")

        def watch() -> None:
            while not ended.wait(0.5):
                with contextlib.suppress(OSError):  # a file that gets its name just now
                    there = sum(file.stat().st_size for file in folder.iterdir())
                    tell(min(9, 10 * there // total))

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()
        tell(10)
