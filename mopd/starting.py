"""Starts every process of a run, all at once, each with what it is told of the configuration."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from mopd.build import Prepared
from mopd.config.schema import DEVICE_TRANSPORTS
from mopd.observe.progress import Progress
from mopd.runtime.judge_pool import JudgePool
from mopd.runtime.rollout_pool import RolloutPool
from mopd.runtime.startup import Startup, all_of
from mopd.runtime.student_group import StudentGroup
from mopd.runtime.teacher_fleet import TeacherFleet
from mopd.system import System


async def start_system(
    prepared: Prepared,
    progress: Progress,
    run_dir: Path,
    stack: AsyncExitStack,
    host: str,
) -> System:
    """Start every process at once and wait until all of them answer."""
    config = prepared.config
    layout, student_config = config.student.parallel, config.student
    transport = config.weight_sync.transport
    reference = config.objective.kl.reference
    startup = Startup(progress.waiting, progress.note, progress.warn)
    logs = (run_dir / "logs").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    judge = JudgePool(prepared.judged(), prepared.decode, logs)
    teachers = TeacherFleet.of_run(prepared, logs, host)
    stack.push_async_callback(teachers.close)
    engines = RolloutPool(config.rollout)
    student = StudentGroup(
        layout.dp * layout.tp * layout.pp,
        threads=student_config.threads_per_rank,
        gpus=student_config.gpus_per_rank,
        loopback=config.ray.address is None,
    )

    async def start_judge() -> None:
        with startup.waiting("verifiers"):
            await judge.ready()

    await all_of(
        [
            start_judge(),
            teachers.start(startup, extra=[reference] if reference else []),
            engines.build(
                startup,
                log_dir=logs,
                model=Path(student_config.model),
                config=config.rollout,
                dtype=student_config.dtype,
                max_model_len=prepared.max_model_len,
                valid_vocab=prepared.valid_vocab,
                vocab_size=prepared.limits.vocab_size,
                eos_token_ids=prepared.eos_token_ids,
                seed=config.seed,
                record_routes=student_config.routing_replay,
                fp32_head=student_config.fp32_head,
                transfer=transport if transport in DEVICE_TRANSPORTS else None,
            ),
            student.build(
                startup,
                log_dir=logs,
                config=student_config,
                objective=config.objective,
                domains=list(config.domains),
                total_steps=config.train.steps,
                temperature=config.rollout.temperature,
                valid_vocab=prepared.valid_vocab,
                pad_id=prepared.eos_token_ids[0],
                seed=config.seed,
                epochs=config.train.epochs,
                minibatches=config.train.minibatches,
                teacher_folders=prepared.teachers_in_ranks(),
            ),
        ]
    )
    if transport in DEVICE_TRANSPORTS:
        with startup.waiting("weight transfer"):
            await student.connect(engines.actors, transport)
    system = System(prepared, progress, run_dir, student, engines, teachers, judge)
    stack.callback(system.close)
    return system
