"""Which folder a run may use: its own, to go on; never somebody else's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mopd.checkpoints import Checkpoint
from mopd.config.load import save_config
from mopd.config.schema import Config, DomainConfig, TeacherConfig
from mopd.errors import ConfigError
from mopd.observe.versions import write_versions
from mopd.run_dir import LOCK, run_folder


def config(runs: Path, **changes: object) -> Config:
    made = Config(
        name="r",
        run_dir=str(runs),
        teachers={"t": TeacherConfig(model="m")},
        domains={"d": DomainConfig(teacher="t")},
    )
    made.student.model = "s"
    made.rollout.max_response_tokens = 8
    made.train.steps, made.train.prompts_per_step = 4, 2
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def a_run(runs: Path, steps: int = 1) -> Path:
    folder = runs / "r"
    folder.mkdir(parents=True)
    save_config(config(runs), folder / "config.yaml")
    write_versions(folder)
    if steps:
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


def open_run_dir(made: Config) -> tuple[Path, Checkpoint | None]:
    """As a run that ends at once."""
    with run_folder(made) as opened:
        return opened


def left_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.name != LOCK)


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    assert open_run_dir(config(tmp_path)) == (tmp_path / "r", None)


def test_a_run_is_neither_mixed_nor_lost(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        open_run_dir(config(tmp_path))
    assert open_run_dir(config(tmp_path, resume=True))[0] == folder
    assert (folder / "metrics.jsonl").exists()
    open_run_dir(config(tmp_path, overwrite=True))
    assert left_in(folder) == []


def test_a_run_that_never_began_does_not_block_its_name(tmp_path: Path) -> None:
    folder = a_run(tmp_path, steps=0)
    open_run_dir(config(tmp_path))
    assert left_in(folder) == []


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_somebody_elses_folder_is_never_touched(tmp_path: Path, how: str) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not a run's folder"):
        open_run_dir(config(tmp_path, **{how: True}))
    assert (tmp_path / "r/thesis.txt").read_text() == "years of work"
    assert not (tmp_path / "r" / LOCK).exists()


def test_resume_with_other_teachers_is_refused(tmp_path: Path) -> None:
    a_run(tmp_path)
    other = config(tmp_path, resume=True, teachers={"t": TeacherConfig(model="another")})
    with pytest.raises(ConfigError, match="another teachers"):
        open_run_dir(other)
    more = config(tmp_path, resume=True)
    more.train.steps = 9
    open_run_dir(more)


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    a_run(tmp_path)
    hold = (
        "import sys, pathlib; from mopd.run_dir import locked\n"
        "with locked(pathlib.Path(sys.argv[1]), print):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "r")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        for how in ("resume", "overwrite"):
            with pytest.raises(ConfigError, match=rf"in use by another run \(process {other.pid} "):
                open_run_dir(config(tmp_path, **{how: True}))
        assert left_in(tmp_path / "r") == ["config.yaml", "metrics.jsonl", "versions.json"]
    finally:
        other.kill()  # not even a chance to clean up
        other.wait()
    open_run_dir(config(tmp_path, overwrite=True))
    with run_folder(config(tmp_path)), pytest.raises(ConfigError, match="in use"):
        open_run_dir(config(tmp_path))


def test_contradiction_and_unwritable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contradict"):
        open_run_dir(config(tmp_path, resume=True, overwrite=True))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_run_dir(config(tmp_path / "file"))
