"""One training run from its configuration to its report: its folder, its signals, its processes.

Ctrl-C ends the step in hand, saves, and leaves no process behind; a second one ends at once. What
happens between start and end is in `mopd.system`.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

from mopd.build import Prepared
from mopd.checkpoints import Checkpoint
from mopd.config.load import save_config
from mopd.errors import ConfigError
from mopd.evaluating.best_student import ended_early
from mopd.evaluation.outcome import EVALUATION, FINAL_ANSWERS, RETENTION, SAMPLES
from mopd.evaluation.report import write_report
from mopd.evaluation.run_files import WARNINGS
from mopd.observe.progress import Progress
from mopd.observe.versions import write_versions
from mopd.run_dir import run_folder
from mopd.runtime.cluster import ray_cluster
from mopd.runtime.leftovers import remove_stale_weights
from mopd.starting import start_system
from mopd.stopping import StopOnSignal
from mopd.system import Outcome
from mopd.weight_sync.publish import transfer_directory


def run_training(prepared: Prepared, progress: Progress) -> Outcome:
    """Run `mopd train`; see the module's text.

    Raises:
        MopdError: anything wrong that a user can mend; its text says what and how.
        KeyboardInterrupt: stopped a second time, or before the first step.
    """
    with run_folder(prepared.config, progress.warn) as (run_dir, checkpoint):
        try:
            return _run_in(prepared, progress, run_dir, checkpoint)
        except Exception as error:
            error.add_note(f"What each process printed: {run_dir / 'logs'}")
            raise


def _run_in(
    prepared: Prepared, progress: Progress, run_dir: Path, checkpoint: Checkpoint | None
) -> Outcome:
    result = run_dir / RETENTION
    early = ended_early(run_dir) if prepared.config.evaluation.patience else None
    finished = checkpoint and checkpoint.step in (early, prepared.config.train.steps)
    if checkpoint and finished and result.exists():
        progress.note(f"{run_dir} is finished; overwrite=true runs it again, more train.steps on")
        retention = json.loads(result.read_text())
        return Outcome(run_dir, checkpoint.step, retention, write_report(run_dir))
    if checkpoint and checkpoint.step > prepared.config.train.steps:
        raise ConfigError(
            f"train.steps is {prepared.config.train.steps}, but {checkpoint.path} has "
            f"{checkpoint.step} steps already; give at least as many"
        )
    for name in (RETENTION, EVALUATION, FINAL_ANSWERS, SAMPLES):
        (run_dir / name).unlink(missing_ok=True)  # of fewer steps than this run will have
    save_config(prepared.config, run_dir / "config.yaml")
    progress.keep_warnings(run_dir / WARNINGS)
    write_versions(run_dir)
    remove_stale_weights(transfer_directory())
    for text in prepared.warnings:
        progress.warn(text)
    for name, data in prepared.domains.items():
        progress.note(f"domain {name}: {data.describe()}")
    if checkpoint is not None:
        progress.note(f"going on from {checkpoint.path}")
    return asyncio.run(_run(prepared, progress, run_dir, checkpoint))


async def _run(
    prepared: Prepared, progress: Progress, run_dir: Path, checkpoint: Checkpoint | None
) -> Outcome:
    config = prepared.config
    stop = StopOnSignal(progress)
    async with AsyncExitStack() as stack:
        progress.waiting({"ray"})
        host = stack.enter_context(ray_cluster(config))
        stack.enter_context(stop)  # after Ray, whose own handlers would end the process
        system = await start_system(prepared, progress, run_dir, stack, host)
        return await system.run(checkpoint, stop)
