"""What `mopd convert` refuses before it builds a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mopd.errors import ModelError
from mopd.student.convert import dtype_of, run_checkpoint, to_hugging_face, to_megatron


def test_a_place_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="exists already"):
        to_megatron(tmp_path / "source", tmp_path, "float32", port=0)
    with pytest.raises(ModelError, match="exists already"):
        to_hugging_face(tmp_path / "source", tmp_path, tmp_path, "float32", port=0)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="exists already"):
        to_megatron(tmp_path / "source", link, "float32", port=0)


def test_a_step_of_a_run_has_a_state_of_its_own_beside_the_students(tmp_path: Path) -> None:
    step = tmp_path / "step_000020"
    for name in ("state.json", "student/state.json"):
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_text("{}")
    assert run_checkpoint(step) is None  # no weights
    (step / "student" / "model.safetensors").touch()
    assert run_checkpoint(step) == run_checkpoint(step / "student") == step / "student"
    (step / "student" / "model.safetensors").rename(step / "student" / "megatron")
    assert run_checkpoint(step) == step / "student"


def test_a_source_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a run's checkpoint .* nor a Megatron"):
        to_hugging_face(tmp_path, tmp_path / "out", tmp_path, "float32", port=0)
    with pytest.raises(ModelError, match=r"no config\.json there"):
        to_megatron(tmp_path, tmp_path / "out", "float32", port=0)


def test_the_dtype_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json there"):
        dtype_of(tmp_path)
    config = tmp_path / "config.json"
    for text, fault in (("{oops", "not readable as JSON"), ("[]", "expected a JSON object")):
        config.write_text(text)
        with pytest.raises(ModelError, match=fault):
            dtype_of(tmp_path)
    config.write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert dtype_of(tmp_path) == "bfloat16"
    config.write_text(json.dumps({"dtype": "float16"}))
    with pytest.raises(ModelError, match="'float16'; give --dtype, one of float32, bfloat16"):
        dtype_of(tmp_path)
