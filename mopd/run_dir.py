"""Which folder a run may use: its own, alone; never somebody else's."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

from mopd.checkpoints import Checkpoint, find_checkpoints, put_back_replaced
from mopd.config.load import load_config
from mopd.config.schema import Config
from mopd.errors import ConfigError

MARKERS = ("config.yaml", "versions.json")
"""Files that every run's folder has; a folder without them is somebody else's."""

LOCK = ".lock"

FIXED_ON_RESUME = ("seed", "student.model", "student.dtype", "rollout", "teachers", "domains")
"""Parts of the configuration that recorded answers and checkpoints depend on."""


@contextmanager
def run_folder(
    config: Config, warn: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Path, Checkpoint | None]]:
    """The run's folder, held against other runs, and the checkpoint to go on from.

    Raises:
        ConfigError: the folder holds a run and neither `resume` nor `overwrite` was asked for, or
            it holds something else, or a run of another configuration, or cannot be written, or
            another process uses it.
    """
    run_dir = Path(config.run_dir) / config.name
    must_be_emptied(config, run_dir)  # before the lock is written into somebody else's folder
    with _disk(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir, warn):
        if must_be_emptied(config, run_dir):
            _empty(run_dir)
        put_back_replaced(run_dir)
        checkpoints = find_checkpoints(run_dir)
        yield run_dir, checkpoints[-1] if checkpoints else None


@contextmanager
def _disk(run_dir: Path) -> Iterator[None]:
    """What the disk refuses, for users."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"run_dir: {run_dir} cannot be used ({error})") from error


def must_be_emptied(config: Config, run_dir: Path) -> bool:
    """Whether the folder holds a run that this one replaces. Changes nothing.

    Raises:
        ConfigError: see `run_folder`.
    """
    if config.resume and config.overwrite:
        raise ConfigError("resume=true and overwrite=true contradict each other; give one of them")
    with _disk(run_dir):
        started = (run_dir / "metrics.jsonl").exists() or bool(find_checkpoints(run_dir))
        if not run_dir.exists() or {each.name for each in run_dir.iterdir()} <= {LOCK}:
            return False
    if not all((run_dir / name).exists() for name in MARKERS):
        raise ConfigError(
            f"{run_dir} is not empty and not a run's folder (it has no {MARKERS[0]} and "
            f"{MARKERS[1]}); give this run another name=... or run_dir=..."
        )
    if config.overwrite or not started:
        return True
    if not config.resume:
        raise ConfigError(
            f"{run_dir} already holds a run; go on with it by resume=true, replace it by "
            "overwrite=true, or give this one another name=..."
        )
    require_same_run(run_dir, config)
    return False


def require_same_run(run_dir: Path, config: Config) -> None:
    """Refuse to mix two runs' answers.

    Raises:
        ConfigError: naming what differs between the folder's configuration and this one.
    """
    before = load_config([run_dir / MARKERS[0]])
    changed = [key for key in FIXED_ON_RESUME if attrgetter(key)(before) != attrgetter(key)(config)]
    if changed:
        raise ConfigError(
            f"{run_dir} cannot be resumed with another {', '.join(changed)}: its recorded answers "
            "and checkpoints were made with the one in its config.yaml; give this run another "
            "name=..., or replace that one by overwrite=true"
        )


@contextmanager
def locked(run_dir: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder while the block runs. The system lets go of it when the process ends, however
    it ends; the file stays, since removing it would let two others in.

    Raises:
        ConfigError: another process holds it; its id and machine are named.
    """
    with _disk(run_dir):
        file = (run_dir / LOCK).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "of unknown id"
            raise ConfigError(
                f"{run_dir} is in use by another run (process {holder}); wait for it, stop it, or "
                "give this run another name=..."
            ) from None
        except OSError as error:
            warn(
                f"{run_dir} cannot be locked on this file system ({error.strerror}): see to it "
                "yourself that no other run uses it"
            )
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _empty(run_dir: Path) -> None:
    """Remove all but the lock, which must stay the file that others look at."""
    with _disk(run_dir):
        for each in run_dir.iterdir():
            if each.name == LOCK:
                continue
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()
