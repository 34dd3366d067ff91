"""`mopd evaluate` from its arguments to what it prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mopd.build import Prepared
from mopd.config.schema import Config
from mopd.errors import ConfigError
from mopd.evaluating.baselines import merged_baselines
from mopd.evaluating.run import EvaluationOutcome, run_evaluation
from mopd.evaluation.tables import retention_notes, retention_table, score_table
from mopd.observe.progress import Progress
from mopd.run_dir import locked


def student_place(config: Config, asked: str | None) -> str | None:
    """Folder or URL of the student to evaluate; None for base and teachers alone.

    Raises:
        ConfigError: ``best`` was asked for, and the run has kept none.
    """
    run_dir = Path(config.run_dir) / config.name
    if asked is None:
        folder = run_dir / "student"
        return str(folder) if folder.is_dir() else None
    if asked == "none":
        return None
    if asked == "best":
        folder = run_dir / "best" / "student"
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not there: the run has kept no best student (evaluation.keep_best, "
                "evaluation.every)"
            )
        return str(folder)
    return asked


def result_folder(config: Config, asked: Path | None) -> Path:
    """The run's folder if it is one (else training would refuse it later), or one beside it.

    Raises:
        ConfigError: the folder asked for cannot be one.
    """
    if asked is not None:
        try:
            asked.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--out {asked} cannot be made a folder ({error.strerror or error}); name another"
            ) from None
        return asked
    run_dir = Path(config.run_dir) / config.name
    if (run_dir / "config.yaml").exists():
        return run_dir
    return run_dir.with_name(f"{run_dir.name}.evaluation")


def further_models(given: Sequence[str]) -> dict[str, str]:
    """``NAME=PLACE`` arguments.

    Raises:
        ConfigError: one is not of that form, or a name is given twice.
    """
    models: dict[str, str] = {}
    for text in given:
        name, equals, place = text.partition("=")
        if not equals or not name or not place or name in models:
            raise ConfigError(
                f"--model {text!r}: expected NAME=PLACE, each name once, such as "
                "--model merged=runs/quickstart/baselines/average"
            )
        models[name] = place
    return models


def evaluate_command(arguments: argparse.Namespace, prepared: Prepared) -> int:
    """Run the evaluation and print its tables; returns the exit code."""
    config = prepared.config
    out_dir = result_folder(config, arguments.out)
    student = student_place(config, arguments.student)
    with Progress(0, list(config.domains), plain=True if arguments.plain else None) as progress:
        if student is None:
            progress.note("no student is evaluated: base and teachers alone")
        others = further_models(arguments.model)
        out_dir.mkdir(parents=True, exist_ok=True)
        with locked(out_dir, progress.warn):  # a run that trains writes the same files
            if arguments.baselines:
                merged, reasons = merged_baselines(prepared, progress, out_dir / "baselines")
                for text in reasons:
                    progress.warn(text)
                others |= merged
            outcome = run_evaluation(prepared, progress, out_dir, student=student, others=others)
    show(outcome)
    return 0


def show(outcome: EvaluationOutcome) -> None:
    """The tables on stdout."""
    from rich.console import Console

    # Into a file or a pipe there is no width to fit; the table must not be cut.
    console = Console(width=None if sys.stdout.isatty() else 120)
    if outcome.retention is not None:
        console.print(retention_table(outcome.retention))
        for note in retention_notes(outcome.retention):
            console.print(note)
    console.print(score_table(outcome.record))
    cost: Mapping[str, object] = outcome.record["cost"]
    share = cost["engine_share"]
    if isinstance(share, float):
        print(
            f"{cost['answers_asked']} answers in {cost['wall_s']:.0f} s; vLLM itself was at work "
            f"in {share:.0%} of the time after its start"
        )
    print(f"results:   {outcome.out_dir / 'evaluation.json'}")
    print(f"report:    {outcome.report}")
