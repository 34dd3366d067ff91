"""Running many checks of the student in one launch of processes.

Importing torch and Megatron costs seconds a process, and the student changes process globals
(`mopd.student.cpu_platform`), so its tests run in processes of their own: one launch walks through
a list of cases, and pytest reports each case by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd.runtime.ports import free_port

TIMEOUT_S = 600.0


class Context:
    """What a case is given: who it is, and a folder that all ranks share."""

    def __init__(self, rank: int, world: int, folder: Path, ports: list[int]) -> None:
        self.rank, self.world, self.folder, self._ports = rank, world, folder, list(ports)
        self.kept: dict[str, Any] = {}

    def port(self) -> int:
        """The next of a ring of ports that all ranks hold."""
        self._ports.append(self._ports.pop(0))
        return self._ports[-1]

    def student(self, kind: str, world: int | None = None, **options: Any) -> Any:
        """A StudentRank on the shared tiny checkpoint `kind`; see `student_options`."""
        from mopd.student.trainer import StudentRank

        config, objective, rest = student_options(self.folder / kind, **options)
        alone = world == 1
        return StudentRank(
            config,
            objective,
            **rest,
            rank=0 if alone else self.rank,
            world_size=1 if alone else self.world,
            master_port=self.port() if alone else 0,
        )


def student_options(
    model: Path,
    *,
    optimizer: dict[str, Any] | None = None,
    objective: dict[str, Any] | None = None,
    parallel: dict[str, int] | None = None,
    temperature: float = 1.0,
    total_steps: int = 10,
    rest: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Any, Any, dict[str, Any]]:
    """(StudentConfig, ObjectiveConfig, other arguments of StudentRank) with test defaults."""
    from student_tiny import PAD, VALID

    from mopd.config.schema import OptimizerConfig, ParallelConfig, StudentConfig

    student = StudentConfig(
        model=str(model),
        optimizer=OptimizerConfig(**({"warmup_steps": 3, "clip_grad": 0.0} | (optimizer or {}))),
        parallel=ParallelConfig(**(parallel or {})),
        **({"micro_batch_size": 4} | config),
    )
    arguments = (rest or {}) | dict(
        domains=["a", "b"],
        total_steps=total_steps,
        temperature=temperature,
        valid_vocab=VALID,
        pad_id=PAD,
    )
    return student, objective_of({"truncation": {"kind": "raw"}} | (objective or {})), arguments


def objective_of(groups: dict[str, Any]) -> Any:
    """ObjectiveConfig of {group: {key: value}, key: value}."""
    from mopd.config.objective import ObjectiveConfig

    objective = ObjectiveConfig()
    for name, value in groups.items():
        nested = isinstance(value, dict)
        part = getattr(objective, name) if nested else objective
        for key, each in (value if nested else {name: value}).items():
            assert hasattr(part, key), (name, key)
            setattr(part, key, each)
    return objective


Case = Callable[[Context], None]


def _work(
    rank: int, world: int, folder: Path, ports: list[int], setup: Case | None, cases: list[Case]
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    context = Context(rank, world, folder, ports)
    try:
        if setup is not None:
            setup(context)
        for case in cases:
            start = time.monotonic()
            try:
                case(context)
            except Exception:
                (folder / f"{case.__name__}.{rank}.failed").write_text(traceback.format_exc())
                if world > 1:  # the ranks are out of step now
                    raise
                _leave_groups()
                continue
            took = time.monotonic() - start
            (folder / f"{case.__name__}.{rank}.passed").write_text(f"{took:.1f}s")
            if dist.is_initialized():
                dist.barrier()  # a case that failed on one rank ends the launch here
    except BaseException:
        (folder / f"failure.{rank}").write_text(traceback.format_exc())
        raise


def _leave_groups() -> None:
    """What a case that failed before `close` left behind, so that the next one can start."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(world: int, folder: Path, cases: list[Case], setup: Case | None = None) -> None:
    """Run `cases` in order on `world` processes; their outcomes are files in `folder`."""
    ports: list[int] = []
    while len(ports) < 8:
        ports = list({*ports, free_port("127.0.0.1")})
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=_work, args=(rank, world, folder, ports, setup, cases))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT_S
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        if any(p.exitcode not in (None, 0) for p in processes):
            time.sleep(2)  # let the others write what they saw
            break
        time.sleep(0.05)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def require_passed(folder: Path, case: Case, world: int) -> None:
    """Fail the pytest test of `case` unless every rank passed it."""
    passed = [(folder / f"{case.__name__}.{rank}.passed").exists() for rank in range(world)]
    if all(passed):
        return
    own = [f"{case.__name__}.{rank}.failed" for rank in range(world)]
    files = [folder / name for name in own if (folder / name).exists()] or [
        # Not its own fault: a case before it, or the set-up, ended the launch.
        file
        for rank in range(world)
        if (file := folder / f"failure.{rank}").exists()
    ]
    failures = [f"{file.name}:\n{file.read_text()}" for file in files]
    pytest.fail("\n".join(failures) or f"{case.__name__} did not finish in {TIMEOUT_S} s")
