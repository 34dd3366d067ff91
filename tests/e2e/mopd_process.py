"""Running the `mopd` command as a user does, and seeing that it leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = "configs/quickstart.yaml"
MARK = "MOPD_TEST_MARK"

SMALL = [
    "train.prompts_per_step=12",
    "train.samples_per_prompt=2",
    "student.optimizer.warmup_steps=1",
    "evaluation.bootstrap=200",
    "evaluation.every=0",
]
"""Overrides that make a step of the quickstart small."""


class MopdProcess:
    """One `mopd ...` in a process group of its own; its processes are known by a mark."""

    def __init__(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mopd.cli", *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), MARK: self.mark},
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Exit code; shows the output when it takes too long."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.text()}") from None

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.process.poll() is None, f"ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"not ready after {timeout_s} s:\n{self.text()}"
            time.sleep(0.2)

    def interrupt_as_a_terminal(self) -> None:
        """Ctrl-C: SIGINT to every process of the foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def left_over(self) -> list[str]:
        """Command lines of processes of this run that still live."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(" ".join(process.cmdline())[:120])
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def end(self) -> None:
        """Kill whatever is left of this run."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    process.kill()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue


def run_mopd(arguments: Sequence[str], log: Path, timeout_s: float = 600) -> MopdProcess:
    """Run to the end; the command must succeed and leave nothing behind."""
    run = MopdProcess(arguments, log)
    try:
        code = run.wait(timeout_s)
        assert code == 0, f"exit code {code}:\n{run.text()}"
        assert run.left_over() == []
    finally:
        run.end()
    return run


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
