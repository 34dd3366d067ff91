"""C34 on the trainer's side: what does not fit is named before any weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from student_tiny import KINDS, hf_config, make_checkpoint

from mopd.config.schema import ParallelConfig
from mopd.errors import ConfigError, ModelError
from mopd.student.families import FAMILIES, family_of
from mopd.student.opening import open_checkpoint
from mopd.student.parallel import check_layout

Tensors = dict[str, torch.Tensor]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "moe", "moe")


@pytest.fixture
def change(moe: Path) -> Callable[[Callable[[Tensors], None]], Path]:
    """Change the checkpoint's tensors and return its folder."""

    def apply(edit: Callable[[Tensors], None]) -> Path:
        tensors = load_file(moe / "model.safetensors")
        edit(tensors)
        save_file(tensors, moe / "model.safetensors", metadata={"format": "pt"})
        return moe

    return apply


def test_good_checkpoints_open(tmp_path: Path) -> None:
    for kind in KINDS:
        folder = make_checkpoint(tmp_path / kind, kind)
        family, source = open_checkpoint(folder)
        assert family.shapes() == source.shapes


def test_missing_router(change: Callable) -> None:
    config = change(lambda t: t.pop("model.layers.1.mlp.gate.weight"))
    with pytest.raises(ModelError, match=r"1 missing: model\.layers\.1\.mlp\.gate\.weight"):
        open_checkpoint(config)


def test_unexpected_name(change: Callable) -> None:
    config = change(lambda t: t.update({"model.extra.weight": torch.zeros(1)}))
    with pytest.raises(ModelError, match=r"1 unexpected: model\.extra\.weight"):
        open_checkpoint(config)


def test_wrong_shape(change: Callable) -> None:
    config = change(lambda t: t.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight \[3\] \(expected \[64\]\)"):
        open_checkpoint(config)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_quantised_tensors(change: Callable, dtype: torch.dtype) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    config = change(lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(ModelError, match=r"1 of another type than F64, .*q_proj\.weight \("):
        open_checkpoint(config)


@pytest.mark.parametrize("text", ["{oops", "{}", "[]", '{"weight_map": []}'])
def test_a_broken_index(moe: Path, text: str) -> None:
    (moe / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json: not a safetensors index"):
        open_checkpoint(moe)


def test_a_setting_of_another_type(moe: Path) -> None:
    settings = json.loads((moe / "config.json").read_text())
    (moe / "config.json").write_text(json.dumps(settings | {"hidden_size": "64"}))
    with pytest.raises(ModelError, match="transformers refuses its config.json .*hidden_size"):
        open_checkpoint(moe)


def test_many_problems_are_counted(change: Callable) -> None:
    def drop_experts(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]
        tensors["stray"] = torch.zeros(1)

    with pytest.raises(ModelError, match=r"48 missing: .* and 40 more; 1 unexpected: stray"):
        open_checkpoint(change(drop_experts))


def test_unreadable_and_absent_files(moe: Path) -> None:
    (moe / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        open_checkpoint(moe)
    (moe / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        open_checkpoint(moe)
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(moe / "nowhere")


def test_several_files_with_an_index(moe: Path) -> None:
    tensors = load_file(moe / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, moe / file)
    index = {n: file for file, part in parts.items() for n in part}
    (moe / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelError, match=r"both model\.safetensors and the files of"):
        open_checkpoint(moe)
    (moe / "model.safetensors").unlink()
    opened: list[Path] = []

    def counted(file: Path, **options: str) -> Any:
        opened.append(file)
        return safe_open(file, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mopd.student.tensor_files.safe_open", counted)
        _, source = open_checkpoint(moe)
        assert all(source.get(n).equal(tensors[n]) for n in names)
    assert opened == [moe / file for file in parts]  # each header is read once
    (moe / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no b\.safetensors"):
        open_checkpoint(moe)


def test_tied_head_stored_beside_the_embedding(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tied", "tied")
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    open_checkpoint(folder)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="lm_head.weight differs"):
        open_checkpoint(folder)


def test_unknown_family() -> None:
    with pytest.raises(ModelError, match=r"'gpt2' cannot be trained; known are deepseek_v3, llama"):
        family_of("gpt2", "some/folder")


@pytest.mark.parametrize(
    ("kind", "override", "text"),
    [
        ("dense", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("dense", {"attention_bias": True}, "attention_bias is True"),
        ("moe", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("moe", {"num_experts_per_tok": 9}, "num_experts 8 with num_experts_per_tok 9"),
        ("moe", {"num_experts_per_tok": 1}, "norm_topk_prob with num_experts_per_tok 1"),
        (
            "dense",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "only the default and the llama3 kind",
        ),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        (
            "dense",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        (
            "llama3",
            {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}},
            "low_freq_factor 2.0; only 1.0",
        ),
        ("mixtral", {"sliding_window": 64}, "sliding_window is 64; only None"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not implemented"),
        ("deepseek", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("deepseek", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        ("deepseek", {"topk_group": 4}, "twice as many experts as groups"),
        ("deepseek", {"n_shared_experts": 0}, "n_shared_experts is 0"),
        ("yarn", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "and yarn, with"),
        *(
            ("yarn", {"rope_parameters": YARN | {name: value}}, f"has {name} {value}; only")
            for name, value in (
                ("mscale_all_dim", 0.0),
                ("mscale", 0.0),
                ("attention_factor", 2.0),
                ("truncate", False),
            )
        ),
    ],
)
def test_settings_that_are_not_implemented(kind: str, override: dict, text: str) -> None:
    hf = hf_config(kind, **override)
    with pytest.raises(ModelError, match=text):
        FAMILIES[hf.model_type](hf, "here")


@pytest.mark.parametrize(
    ("kind", "layout", "world", "text"),
    [
        ("moe", {"dp": 2}, 4, "= 2 ranks, but 4 were started"),
        ("moe", {"tp": 4}, 4, "tp 4 does not divide the model's num_query_groups 2"),
        ("moe", {"pp": 4}, 4, "pp 4 does not divide the model's num_layers 2"),
        ("moe", {"dp": 2, "ep": 4}, 2, "ep 4 x etp 1 = 4 must divide dp x tp = 2"),
        ("moe", {"dp": 3, "ep": 3}, 3, "ep 3 does not divide the model's num_moe_experts 8"),
        ("dense", {"dp": 2, "ep": 2}, 2, "need a model with experts"),
        ("moe", {"dp": 0}, 0, "dp is 0"),
        ("moe", {"tp": 2, "cp": 2}, 2, "cp is 2; only 1 is implemented"),
        ("deepseek", {"tp": 2}, 2, "latent attention is split over ranks with Transformer Engine"),
    ],
)
def test_layouts_that_cannot_be(kind: str, layout: dict, world: int, text: str) -> None:
    hf = hf_config(kind)
    family = FAMILIES[hf.model_type](hf, "here")
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        check_layout(ParallelConfig(**layout), family, world)
