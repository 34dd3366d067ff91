"""What `mopd check` finds beyond the configuration itself, and that it names the key at fault."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mopd.build import require_kernel
from mopd.checking.estimates import placement_lines
from mopd.config.model_files import read_model_limits
from mopd.config.schema import Config, DomainConfig, TeacherConfig
from mopd.errors import ConfigError, ModelError
from mopd.kernels.backends import forget_choices
from mopd.model_folders import context_limits, require_same_tokenizer

BASE = Path(__file__).parents[2] / "demo" / "models" / "base"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(BASE, folder)
    (folder / "tokenizer.json").write_text("{")
    (folder / "config.json").write_text("{")
    return folder


def config() -> Config:
    made = Config(
        teachers={"t": TeacherConfig(model=str(BASE)), "idle": TeacherConfig(model=str(BASE))},
        domains={"d": DomainConfig(teacher="t")},
    )
    made.student.model = str(BASE)
    return made


def test_a_teachers_broken_files_name_the_teacher(broken: Path) -> None:
    with pytest.raises(ModelError, match=r"^teachers\.math\.model: no readable tokenizer"):
        require_same_tokenizer(BASE, {"fine": BASE, "math": broken})
    with pytest.raises(ModelError, match=r"^teachers\.t\.model: .*config\.json: not valid JSON"):
        context_limits(config(), read_model_limits(BASE), {"t": broken})


def test_triton_without_a_gpu_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    forget_choices()  # another test's interpreter
    made = config()
    require_kernel(made)
    made.student.kernel = "triton"
    with pytest.raises(ConfigError, match="Triton compiles for CUDA only"):
        require_kernel(made)
    made.student.gpus_per_rank = 1.0
    require_kernel(made)
    forget_choices()


def test_placement_is_told_and_gpus_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    made = config()
    made.student.parallel.dp = 2
    said = placement_lines(made)
    assert said[0].startswith("processes: 2 x student rank (1 CPU), 1 x rollout engine (1 CPU)")
    assert "teacher t" in said[0] and "teacher idle" not in said[0]  # no domain names it
    assert said[1:] == ["CPUs reserved: 5: they take turns on 2 here"]
    made.teachers["t"].gpus = 1
    assert placement_lines(made)[-1] == "GPUs reserved: 1 of 1 here"
    made.student.gpus_per_rank = 0.5
    with pytest.raises(ConfigError, match="reserve 2 GPUs, this machine has 1: 2 x student rank"):
        placement_lines(made)
    made.ray.address = "auto"
    assert placement_lines(made)[-1] == "the cluster at 'auto' must have 5 CPUs and 2 GPUs"
