"""What `mopd convert` refuses before it builds a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mopd.errors import ModelError
from mopd.student.convert import dtype_of, to_hugging_face, to_megatron


def test_a_place_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="exists already"):
        to_megatron(tmp_path / "source", tmp_path, "float32", port=0)
    with pytest.raises(ModelError, match="exists already"):
        to_hugging_face(tmp_path / "source", tmp_path, tmp_path, "float32", port=0)


def test_a_source_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a run's checkpoint .* nor a Megatron"):
        to_hugging_face(tmp_path, tmp_path / "out", tmp_path, "float32", port=0)
    with pytest.raises(ModelError, match=r"no config\.json there"):
        to_megatron(tmp_path, tmp_path / "out", "float32", port=0)


def test_the_dtype_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no readable config\.json"):
        dtype_of(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert dtype_of(tmp_path) == "bfloat16"
    config.write_text(json.dumps({"dtype": "float16"}))
    with pytest.raises(ModelError, match="'float16'; give --dtype, one of float32, bfloat16"):
        dtype_of(tmp_path)
