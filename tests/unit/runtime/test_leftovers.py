"""Only files of processes that are gone are removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mopd.runtime.leftovers import remove_stale_weights


def test_weights_of_dead_processes_go_and_nothing_else(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = tmp_path / f"mopd-weights-{gone.pid}-3.safetensors"
    kept = [
        tmp_path / f"mopd-weights-{os.getpid()}-3.safetensors",
        tmp_path / "mopd-weights-1-3.safetensors",  # alive, and not ours to ask
        tmp_path / f"mopd-weights-{10**30}-3.safetensors",
        tmp_path / f"other-{gone.pid}-3.safetensors",
    ]
    for path in (stale, *kept):
        path.write_bytes(b"w")
    assert remove_stale_weights(tmp_path) == [stale]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert remove_stale_weights(tmp_path / "nix") == []
