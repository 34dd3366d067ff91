"""C34: names or shapes that differ are named, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mopd.errors import ModelError, WeightSyncError
from mopd.rollout.manifest import checkpoint_manifest, file_manifest, require_same_tensors

EXPECTED = {"gate.weight": (8, 64), "head.weight": (260, 64)}


def test_manifest_reads_names_and_shapes(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(())}, tmp_path / "two.safetensors", metadata={"format": "pt"})
    assert checkpoint_manifest(tmp_path) == {"a": (2, 3), "b": (4,), "c": ()}


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 8, b"\x08" + b"\0" * 7 + b"not json"])
def test_a_truncated_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="bad.safetensors: not a readable safetensors file"):
        file_manifest(path)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no .*safetensors file"):
        checkpoint_manifest(tmp_path)


@pytest.mark.parametrize(
    ("got", "text"),
    [
        ({"head.weight": (260, 64)}, r"missing gate.weight \[8, 64\]"),
        ({**EXPECTED, "extra": (1,)}, r"unexpected extra \[1\]"),
        (
            {**EXPECTED, "head.weight": (264, 64)},
            r"head.weight: shape \[264, 64\], expected \[260, 64\]",
        ),
    ],
)
def test_differences_are_named(got: dict[str, tuple[int, ...]], text: str) -> None:
    with pytest.raises(WeightSyncError, match=text):
        require_same_tensors(got, EXPECTED, "weights version 3")


def test_equal_manifests_pass() -> None:
    require_same_tensors(dict(EXPECTED), EXPECTED, "weights version 3")
