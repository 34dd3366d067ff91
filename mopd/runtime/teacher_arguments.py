"""The arguments of `mopd teachers`; what does the work is imported when it is called."""

from __future__ import annotations

import argparse


def _run(arguments: argparse.Namespace) -> int:
    from mopd.runtime.teacher_commands import run

    return run(arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`mopd teachers` and what follows."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, text: str, place: str) -> argparse.ArgumentParser:
        command = actions.add_parser(name, help=text, description=text)
        command.add_argument("place", metavar=place)
        command.set_defaults(run=_run, action=name)
        return command

    listed = action("list", "who the teachers are, and how they do", "CONFIG|RUN_DIR")
    listed.add_argument("more", nargs="*", metavar="MORE.yaml | key=value")
    listed.add_argument("--json", action="store_true", help="one JSON object")
    probe = action("probe", "start or ask teachers and put them to the test", "CONFIG")
    probe.add_argument("names", nargs="*", metavar="NAME", help="these alone")
    probe.add_argument("--json", action="store_true", help="one JSON object")
    serve = action("serve", "run one teacher outside any training run", "CONFIG")
    serve.add_argument("name", metavar="NAME")
    serve.add_argument("--host", default="127.0.0.1", help="loopback unless said otherwise")
    serve.add_argument("--port", type=int, default=8000, help="0 takes any free port")
    for name, text in (
        ("add", "give a run one more teacher, or a teacher one more server, from a next step on"),
        ("remove", "take a server, or a teacher that was added, from a run, from a next step on"),
    ):
        change = action(name, text, "RUN_DIR")
        change.add_argument("name", metavar="NAME")
        if name == "add":
            change.add_argument(
                "--endpoint", help="URL of a server that runs; else the run starts one more"
            )
            change.add_argument(
                "--model",
                help="the name that it must serve; of a new teacher without --endpoint, a folder",
            )
            change.add_argument(
                "--domain", help="NAME is new, and scores this domain in its teacher's place"
            )
            change.add_argument(
                "more",
                nargs="*",
                metavar="key=value",
                help="of a new teacher, as under `teachers` in a configuration: gpus=1, "
                "api_key_env=NAME (of the run's environment), ...",
            )
        else:
            change.add_argument(
                "--endpoint", help="URL of one server, as `list` shows it; else the whole teacher"
            )
