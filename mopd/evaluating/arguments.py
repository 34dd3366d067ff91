"""What `mopd evaluate` takes beside a configuration; imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What `mopd evaluate` takes beside a configuration."""
    command.add_argument(
        "--student",
        metavar="PLACE",
        help="a Hugging Face folder, URL[#MODEL] of an OpenAI-compatible server, 'best' for the "
        "run's best checkpoint, or 'none'; without it the run's final student, where there is one",
    )
    command.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PLACE",
        help="a further model to compare, a folder or a URL; may be given several times",
    )
    command.add_argument(
        "--baselines",
        action="store_true",
        help="also merge the teachers (weight average; task arithmetic, its scale chosen on "
        "training prompts) and evaluate the results",
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="where results go; without it the run's folder"
    )
