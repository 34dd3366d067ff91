"""Merged checkpoints against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopd.errors import ModelError
from mopd.evaluation.merging import merge_models, mergeable, task_arithmetic, weight_average

SHAPES = {"a.weight": (4, 3), "b.weight": (5,)}


def model(folder: Path, seed: int, *, dtype=torch.float32, shapes=SHAPES, split=True) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {k: torch.randn(s, generator=generator).to(dtype) for k, s in shapes.items()}
    tensors["steps"] = torch.tensor([seed])
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = list(tensors)
    parts = [names[:1], names[1:]] if split else [names]
    for k, part in enumerate(parts):
        save_file({n: tensors[n] for n in part}, folder / f"model-{k}.safetensors")
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def test_average_and_task_arithmetic(tmp_path):
    base, one, two = (model(tmp_path / n, k, split=k != 2) for k, n in enumerate("xyz"))
    b, t1, t2 = map(tensors, (base, one, two))
    merge_models(base, [one, two], weight_average, tmp_path / "average")
    merge_models(base, [one, two], task_arithmetic(0.4), tmp_path / "sum")
    average, added = tensors(tmp_path / "average"), tensors(tmp_path / "sum")
    for name in SHAPES:
        torch.testing.assert_close(average[name], (t1[name] + t2[name]) / 2)
        expected = b[name] + 0.4 * ((t1[name] - b[name]) + (t2[name] - b[name]))
        torch.testing.assert_close(added[name], expected)
    assert average["steps"].item() == 0  # not a weight: the base's
    assert (tmp_path / "average" / "config.json").exists()
    assert sorted(p.name for p in (tmp_path / "average").glob("*.safetensors")) == [
        "model-0.safetensors", "model-1.safetensors",
    ]  # fmt: skip


def test_task_arithmetic_of_one_over_n_is_the_average_and_of_zero_the_base(tmp_path):
    base, one, two = (model(tmp_path / n, k) for k, n in enumerate("xyz"))
    for scale, expected in ((0.5, weight_average), (0.0, lambda b, t: b)):
        merge_models(base, [one, two], task_arithmetic(scale), tmp_path / "got")
        merge_models(base, [one, two], expected, tmp_path / "wanted")
        got, wanted = tensors(tmp_path / "got"), tensors(tmp_path / "wanted")
        for name in SHAPES:
            torch.testing.assert_close(got[name], wanted[name])


def test_sums_are_taken_in_float32_and_kept_in_the_bases_dtype(tmp_path):
    base, one = (model(tmp_path / n, k, dtype=torch.bfloat16) for k, n in enumerate("xy"))
    merge_models(base, [one, one, one], weight_average, tmp_path / "out")
    for name in SHAPES:
        merged = tensors(tmp_path / "out")[name]
        assert merged.dtype == torch.bfloat16 and torch.equal(merged, tensors(one)[name])


def test_another_architecture_does_not_fit_and_is_named(tmp_path):
    base, one = model(tmp_path / "x", 0), model(tmp_path / "y", 1)
    other = model(tmp_path / "z", 2, shapes={"a.weight": (4, 3), "b.weight": (6,)})
    fitting, reasons = mergeable(base, {"one": one, "dense": other})
    assert fitting == {"one": one}
    assert "teacher dense cannot be merged" in reasons[0] and "b.weight" in reasons[0]
    with pytest.raises(ModelError, match="b.weight"):
        merge_models(base, [one, other], weight_average, tmp_path / "out")
    with pytest.raises(ModelError, match="no teacher is of its architecture"):
        merge_models(base, [], weight_average, tmp_path / "out")
    assert not (tmp_path / "out").exists()
