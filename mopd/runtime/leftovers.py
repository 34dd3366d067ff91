"""What a killed run leaves behind outside its folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

_WEIGHTS = re.compile(r"mopd-weights-(\d+)-.*")
"""`VerifiedWeightSync` names its files by the process that publishes them."""


def remove_stale_weights(directory: Path) -> list[Path]:
    """Remove weight files of processes that are gone: a kill in the middle of a sync leaves one,
    which holds its size of shared memory until the machine restarts. Returns what was removed."""
    removed = []
    for path in directory.glob("mopd-weights-*"):
        match = _WEIGHTS.fullmatch(path.name)
        if match is None or _alive(int(match[1])):
            continue
        try:
            path.unlink()
        except OSError:
            continue  # another user's, or another run was faster
        removed.append(path)
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
