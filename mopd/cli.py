"""The `mopd` command.

    mopd train CONFIG [MORE.yaml ...] [key=value ...]    distil; progress, metrics, report
    mopd check CONFIG [...] [--live]                     what can be found wrong before a run
    mopd evaluate CONFIG [...] [--student PLACE]         base, teachers, student on held-out sets
    mopd teachers list|probe|serve|add|remove PLACE      the registry, health, servers
    mopd report RUN_DIR [--gate BOUNDS]                  write a run's report again; judge it
    mopd report --compare RUN_A RUN_B                    two runs' students on the same items
    mopd report --seeds RUN ...                          mean and spread over runs of one recipe
    mopd convert to-hf|to-megatron SOURCE OUT            Hugging Face <-> Megatron checkpoints

Files are merged in order, so a second one can add a domain and its teacher; ``key=value`` wins
over both. Exit code 0: done; 1: something a user can mend, said in one message; 2: wrong usage;
130: stopped by Ctrl-C, saved.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mopd.errors import ConfigError, MopdError

STOPPED = 130
"""Exit code after Ctrl-C, as shells have it; what was done is saved."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = _parse(argv)
    try:
        return arguments.run(arguments)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("mopd: stopped", file=sys.stderr)
        return STOPPED
    except Exception as error:
        # An error raised inside a Ray actor arrives wrapped, with the actor's traceback.
        from mopd_teachers.errors import TeacherError as TeacherServerError

        cause = getattr(error, "cause", None) or error
        if type(error).__name__ in ("ActorDiedError", "RayActorError", "ActorUnavailableError"):
            print(
                "mopd: a process of the run has died (a student rank, rollout engine or teacher "
                "supervisor); most often the machine ran out of memory. What Ray knows:\n"
                f"{error}\nThe last checkpoint, if there is one, is intact: resume=true goes on.",
                *getattr(error, "__notes__", ()),
                sep="\n",
                file=sys.stderr,
            )
            return 1
        if not isinstance(cause, MopdError | TeacherServerError):
            raise
        print(f"mopd: {cause}", file=sys.stderr)
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse stops taking files and ``key=value`` at the first option; here it may stand anywhere
    among them."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    options = [item for item in rest if item.startswith("-")]
    if options or (rest and not hasattr(arguments, "more")):
        parser.error(f"unrecognized arguments: {' '.join(options or rest)}")
    if rest:
        arguments.more += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mopd",
        description="Multi-teacher on-policy distillation: several specialists into one student.",
    )
    plain: dict[str, Any] = {"action": "store_true", "help": "lines instead of a live display"}
    parser.add_argument("--plain", default=False, **plain)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("train", _train, "distil the teachers into the student, then report retention"),
        (
            "check",
            _check,
            "check configuration, tokenizers, prompts, verifiers and room; --live: the teachers",
        ),
        (
            "evaluate",
            _evaluate,
            "score base, teachers, student and any model on every held-out set",
        ),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", metavar="CONFIG", help="the run's YAML file")
        command.add_argument(
            "more", nargs="*", metavar="MORE.yaml | key=value", help="merged over it, in order"
        )
        command.add_argument("--plain", default=argparse.SUPPRESS, **plain)
        command.set_defaults(run=run)
        if name == "check":
            from mopd.checking.arguments import add_arguments as add_check_arguments

            add_check_arguments(command)
        if name == "evaluate":
            from mopd.evaluating.arguments import add_arguments

            add_arguments(command)
    text = "who the teachers are and how they do; put them to the test; run or add servers"
    from mopd.runtime.teacher_arguments import add_arguments as add_teacher_arguments

    add_teacher_arguments(commands.add_parser("teachers", help=text, description=text))
    text = "write report.html and report.md of a run directory again"
    report = commands.add_parser("report", help=text, description=text)
    which = report.add_mutually_exclusive_group(required=True)
    which.add_argument("run_dir", type=Path, nargs="?", metavar="RUN_DIR")
    which.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("RUN_A", "RUN_B"),
        help="compare the students of two runs on their common held-out items instead",
    )
    which.add_argument(
        "--seeds",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="mean and spread of several runs of one recipe instead",
    )
    report.add_argument(
        "--gate",
        metavar="BOUNDS",
        help="exit with 1 unless every domain holds, e.g. min_retention=0.97,max_forgetting=0.01; "
        "min_headroom=...; lower ends of the intervals count, with bound=point the values",
    )
    report.set_defaults(run=_report)
    _add_convert(commands)
    return parser


def _add_convert(commands: Any) -> None:
    text = "Hugging Face folders <-> Megatron checkpoints, in one process"
    convert = commands.add_parser("convert", help=text, description=text)
    ways = convert.add_subparsers(required=True, metavar="WAY", dest="way")
    for way, what, out in (
        ("to-hf", "a run's checkpoint (RUN/checkpoints/step_N) or a Megatron one", "new folder"),
        ("to-megatron", "a Hugging Face folder", "new Megatron distributed checkpoint"),
    ):
        command = ways.add_parser(way, help=f"from {what}", description=f"From {what}.")
        command.add_argument("source", type=Path, metavar="SOURCE", help=what)
        command.add_argument("out", type=Path, metavar="OUT", help=out)
        if way == "to-hf":
            command.add_argument(
                "--like",
                type=Path,
                required=True,
                metavar="HF_FOLDER",
                help="whose config and tokenizer it has: the student.model of the run",
            )
        command.add_argument(
            "--dtype",
            choices=("float32", "bfloat16"),
            help="of the weights written; default: what config.json says",
        )
    convert.set_defaults(run=_convert)


def _prepare(arguments: argparse.Namespace):  # type: ignore[no-untyped-def]
    # Imported late: `mopd --help` must not wait for torch.
    from mopd.build import prepare
    from mopd.config.load import load_config

    overrides = [item for item in arguments.more if "=" in item]
    files = [arguments.config, *(item for item in arguments.more if "=" not in item)]
    return prepare(load_config(files, overrides))


def _train(arguments: argparse.Namespace) -> int:
    from mopd.evaluation.tables import retention_notes, retention_table
    from mopd.observe.progress import Progress
    from mopd.run import run_training

    prepared = _prepare(arguments)
    with Progress(
        prepared.config.train.steps,
        list(prepared.config.domains),
        plain=True if arguments.plain else None,
    ) as progress:
        outcome = run_training(prepared, progress)
    if outcome.retention is not None:
        from rich.console import Console

        # Into a file or a pipe there is no width to fit; the table must not be cut.
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(retention_table(outcome.retention))
        for note in retention_notes(outcome.retention):
            console.print(note)
        print(f"retention: {outcome.run_dir / 'retention.json'}")
        print(f"student:   {outcome.run_dir / 'student'}")
    print(f"report:    {outcome.report}")
    return 0 if outcome.retention is not None else STOPPED


def _check(arguments: argparse.Namespace) -> int:
    from mopd.checking.command import check_command

    return check_command(arguments)


def _evaluate(arguments: argparse.Namespace) -> int:
    from mopd.evaluating.command import evaluate_command

    return evaluate_command(arguments, _prepare(arguments))


def _show_runs(table: Any, lines: Sequence[str]) -> int:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 140).print(table)
    for line in lines:
        print(f"  {line}")
    return 0


def _over_seeds(runs: Sequence[Path]) -> tuple[Any, list[str]]:
    from mopd.evaluation.seeds import over_seeds, seeds_table

    rows, different = over_seeds(runs)
    return seeds_table(rows, runs), different


def _convert(arguments: argparse.Namespace) -> int:
    from mopd.runtime.ports import free_port
    from mopd.student import convert

    like = arguments.source if arguments.way == "to-megatron" else arguments.like
    dtype = arguments.dtype or convert.dtype_of(like)
    port = free_port("127.0.0.1")
    if arguments.way == "to-megatron":
        count = convert.to_megatron(arguments.source, arguments.out, dtype, port)
    else:
        count = convert.to_hugging_face(arguments.source, arguments.out, like, dtype, port)
    print(f"{arguments.out}: {count} Megatron tensors, {dtype}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from mopd.evaluation.compare import compare_runs, compare_table
    from mopd.evaluation.gate import check_gate, parse_gate
    from mopd.evaluation.report import report_of, retention_of
    from mopd.evaluation.run_files import read_run

    if arguments.gate is not None and not arguments.run_dir:
        raise ConfigError("--gate judges one run; leave --compare and --seeds out")
    if arguments.compare:
        a, b = arguments.compare
        rows, different = compare_runs(a, b)
        return _show_runs(compare_table(rows, a.name, b.name), different)
    if arguments.seeds:
        return _show_runs(*_over_seeds(arguments.seeds))
    gate = parse_gate(arguments.gate) if arguments.gate is not None else None
    run = read_run(arguments.run_dir)
    print(report_of(run, lambda text: print(f"warning: {text}", file=sys.stderr)))
    if gate is None:
        return 0
    failed, held = check_gate(retention_of(run), gate)
    for line in held:
        print(f"holds:  {line}")
    for line in failed:
        print(f"FAILED: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
