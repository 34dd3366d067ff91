"""The arguments of `mopd check`; what does the work is imported when it is called."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Beside the configuration files and ``key=value``."""
    parser.add_argument(
        "--live", action="store_true", help="start or ask the teachers, and put each to the test"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
