"""The output of a run's processes, in the run's own folder rather than in Ray's."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path


def write_output_to(path: Path | None) -> None:
    """From here on this process writes stdout and stderr to `path`, native code included, and its
    Python stacks if it crashes there.

    None, or a folder that this machine of a cluster does not have: it goes on writing where it
    did, into Ray's session folder.
    """
    if path is None:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable(2)
