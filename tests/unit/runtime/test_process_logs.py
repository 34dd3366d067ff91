"""A process's output goes to the run's folder: Python's, native code's, and that of a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, pathlib, sys, ctypes
from mopd.runtime.logs import write_output_to
write_output_to(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None)
print("python out")
print("python err", file=sys.stderr)
sys.stdout.flush()
os.write(1, b"native out\\n")
if len(sys.argv) > 1:
    ctypes.string_at(0)
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_everything_lands_in_the_file(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("an earlier run of the same folder\n")
    done = run(log)
    assert done.returncode < 0 and done.stdout == "" and done.stderr == ""
    said = log.read_text()
    for part in ("an earlier run", "python out", "python err", "native out", "Segmentation fault"):
        assert part in said, part


def test_without_a_place_for_it_output_stays_where_it_was(tmp_path: Path) -> None:
    assert "python out" in run().stdout
    assert "python out" in run(tmp_path / "nix" / "rank-0.log").stdout
