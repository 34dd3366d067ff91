"""Places learned from a model that is loaded in some way of its own, and what cannot be learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mopd.errors import ModelError
from mopd.kernels.word_sums import word_sums
from mopd.rollout import direct_load
from mopd.rollout.direct_load import DirectLoad, _Site, _Sites, learn
from mopd.rollout.weight_file import WeightFile

Weights = Iterable[tuple[str, Tensor]]


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (5, 4), "q": (6, 4), "k": (2, 4), "gate.0": (3, 4), "gate.1": (3, 4)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def written(folder: Path, tensors: dict[str, Tensor], name: str = "w.safetensors") -> WeightFile:
    save_file(tensors, folder / name)
    return WeightFile(folder / name)


class Model(nn.Module):
    """Fuses q and k, stacks gates, pads the embedding, and packs the gates by a transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(8, 4))
        self.qk = nn.Parameter(torch.zeros(8, 4))
        self.packed = torch.zeros(4, 6)
        self.sites = _Sites()

    @torch.no_grad()
    def load(self, tensors: Weights) -> None:
        given = dict(tensors)
        self.embed[:5] = given["embed"]
        self.qk.copy_(torch.cat([given["q"], given["k"]]))
        plain = torch.cat([given["gate.0"], given["gate.1"]])

        def pack() -> None:
            self.packed = plain.t().contiguous()

        pack()
        self.sites.of_layer["gates"] = [_Site(plain, pack)]

    def state(self) -> list[Tensor]:
        return [t.detach().clone() for t in (self.embed, self.qk, self.packed)]


def learned(model: Model, file: WeightFile, load: Callable[[Weights], None]) -> DirectLoad | None:
    return learn(model, file, load, lambda: nullcontext(model.sites))


def test_it_loads_what_the_model_would(tmp_path: Path) -> None:
    model, file = Model(), written(tmp_path, weights())
    direct = learned(model, file, model.load)
    assert direct is not None
    assert len(direct._targets) == 5  # one piece a tensor
    for seed in (0, 1):
        new = weights(seed)
        other = written(tmp_path, new, f"{seed}.safetensors")
        assert direct.knows(other)
        sums = direct.load(other)
        assert sums == dict(zip(new, word_sums(list(new.values())), strict=True))
        got = model.state()
        expected = Model()
        expected.load(new.items())
        assert all(a.equal(b) for a, b in zip(got, expected.state(), strict=True))
    # The same file written again in place, as trainers do in shared memory.
    file.tensors["q"].fill_(7.0)
    direct.load(file)
    assert bool(model.qk[:6].eq(7.0).all())


def test_a_file_of_other_tensors_is_not_known(tmp_path: Path) -> None:
    model = Model()
    direct = learned(model, written(tmp_path, weights()), model.load)
    assert direct is not None
    fewer = {n: t for n, t in weights().items() if n != "k"}
    assert not direct.knows(written(tmp_path, fewer, "fewer.safetensors"))


@pytest.mark.parametrize("fault", ["scaled", "forgotten", "twice", "reordered", "half"])
def test_what_is_no_copy_is_not_learned(tmp_path: Path, fault: str) -> None:
    model = Model()

    @torch.no_grad()
    def load(tensors: Weights) -> None:
        given = dict(tensors)
        model.load(given.items())
        if fault == "scaled":
            model.qk.mul_(0.5)
        elif fault == "forgotten":
            model.qk[6:] = 0.0
        elif fault == "twice":
            model.embed[5:7] = given["k"]
        elif fault == "reordered":
            model.qk.copy_(model.qk.clone().view(4, 8).t().reshape(8, 4))
        else:
            model.embed.data = model.embed.data.bfloat16()

    direct_load._MOST_PIECES, before = 1, direct_load._MOST_PIECES
    try:
        assert learned(model, written(tmp_path, weights()), load) is None
    finally:
        direct_load._MOST_PIECES = before


def test_what_is_not_float32_or_too_large_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untouched(_: Weights) -> None:
        raise AssertionError("nothing may be loaded")

    half = written(tmp_path, {n: t.bfloat16() for n, t in weights().items()}, "half.safetensors")
    assert learned(Model(), half, untouched) is None
    monkeypatch.setattr(direct_load, "LIMIT", 50)
    assert learned(Model(), written(tmp_path, weights()), untouched) is None


def test_names_in_another_order_than_the_numbers(tmp_path: Path) -> None:
    """Nothing in the format says that the header lists tensors as they lie in the file."""
    file = written(tmp_path, weights())
    header = json.loads(file.header[8:].numpy().tobytes())
    text = json.dumps(dict(reversed(header.items()))).encode()
    text += b" " * (-len(text) % 8)
    body = file.body.numpy().tobytes()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + body)
    turned, model = WeightFile(tmp_path / "x"), Model()
    assert list(turned.tensors) == list(file.tensors)
    direct = learned(model, turned, model.load)
    assert direct is not None
    direct.load(turned)
    assert model.qk[:6].equal(weights()["q"])


def test_a_weight_file_is_read_in_place(tmp_path: Path) -> None:
    new = weights() | {"half": torch.ones(3, dtype=torch.bfloat16)}
    file = written(tmp_path, new)
    assert file.tensors.keys() == new.keys()
    assert all(file.tensors[n].equal(t) for n, t in new.items())
    assert file.manifest()["q"] == (6, 4)
    assert file.is_still(tmp_path / "w.safetensors")
    assert not file.is_still(tmp_path / "gone.safetensors")
    save_file(weights(1), tmp_path / "w.safetensors")
    assert not file.is_still(tmp_path / "w.safetensors")


@pytest.mark.parametrize("content", [b"", b"abc", (10**9).to_bytes(8, "little") + b"{}"])
def test_a_broken_weight_file_is_an_error_of_ours(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ModelError, match="not a readable safetensors"):
        WeightFile(tmp_path / "x")
    with pytest.raises(ModelError, match="not a readable safetensors"):
        WeightFile(tmp_path / "nothing")
