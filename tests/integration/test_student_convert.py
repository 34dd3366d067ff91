"""`mopd convert` from the command line, both ways, and a save that is killed (C35)."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "student"))

from student_harness import Context  # noqa: E402
from student_tiny import make_checkpoint, make_samples  # noqa: E402

from mopd.runtime.ports import free_port  # noqa: E402


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mopd.cli", "convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_to_megatron_and_back(tmp_path: Path) -> None:
    """Every bit returns, expert biases and tied heads included; other models are refused."""
    from safetensors.torch import load_file

    source = make_checkpoint(tmp_path / "deepseek", "deepseek")
    (source / "tokenizer.json").write_text("{}")
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    done = convert("to-megatron", source, megatron)
    assert done.returncode == 0, done.stderr
    assert "read " in done.stdout and "write 10/10: " in done.stdout
    assert (megatron / "metadata.json").is_file() and not list(tmp_path.glob(".*"))
    done = convert("to-hf", megatron, back, "--like", source)
    assert done.returncode == 0, done.stderr
    original, returned = (load_file(f / "model.safetensors") for f in (source, back))
    assert original.keys() == returned.keys()
    assert all(returned[name].equal(original[name]) for name in original)
    assert {f.name for f in back.iterdir()} == {f.name for f in source.iterdir()}

    other = make_checkpoint(tmp_path / "other", "deepseek", hidden_size=32)
    wrong = convert("to-hf", megatron, tmp_path / "wrong", "--like", other)
    assert wrong.returncode == 1 and "tensors do not fit the model" in wrong.stderr
    assert not (tmp_path / "wrong").exists()


def _wrong_models(folder: Path, ports: list[int]) -> None:
    """A Megatron checkpoint becomes no model that lacks some of it, or has more."""
    import torch
    from safetensors.torch import load_file

    from mopd.config.schema import ParallelConfig, StudentConfig
    from mopd.errors import ModelError
    from mopd.student import megatron_writing, model, parallel
    from mopd.student.convert import to_hugging_face, to_megatron
    from mopd.student.opening import open_checkpoint

    torch.set_num_threads(1)
    for name, kind, options in (
        ("moe", "moe", {}),
        ("deep", "moe", {"num_hidden_layers": 4}),
        ("mixtral", "mixtral", {}),
        ("dense", "dense", {}),
        ("tied", "tied", {}),
        ("wide", "dense", {"vocab_size": 96}),
        ("narrow", "dense", {"vocab_size": 64}),
    ):
        make_checkpoint(folder / name, kind, **options)
    for name in ("moe", "deep", "dense"):
        to_megatron(folder / name, folder / f"{name}_megatron", "float32", ports[0])
    before = {file.name for file in folder.iterdir()}
    for source, like, fault in (
        ("deep", "moe", r"18 unexpected: decoder\.layers\.2"),
        ("moe", "mixtral", r"4 unexpected: .*k_layernorm"),
        ("dense", "tied", r"1 unexpected: output_layer\.weight"),
        ("dense", "wide", r"has 67 rows, the model's vocabulary 96"),
        ("dense", "narrow", r"has 67 rows, the model's vocabulary 64, and .* not 0"),
    ):
        with pytest.raises(ModelError, match=fault):
            to_hugging_face(
                folder / f"{source}_megatron", folder / "out", folder / like, "float32", ports[0]
            )
        assert {file.name for file in folder.iterdir()} == before  # nothing is left behind
    with pytest.raises(ModelError, match="could not be written .*Not a directory"):
        under = folder / "moe" / "config.json" / "out"
        to_megatron(folder / "moe", under, "float32", ports[0])

    # Rows of 0 pad a vocabulary that tensor parallelism did not divide.
    groups = parallel.start(ParallelConfig(), 0, 1, "127.0.0.1", ports[0], 0)
    family, _ = open_checkpoint(folder / "dense")
    padded = model.build(family, StudentConfig(model=str(folder / "dense")), 68)
    tensors = model.state(padded)
    rows = ("embedding.word_embeddings.weight", "output_layer.weight")
    for name in rows:
        tensors[name].data[67:] = 0
    (folder / "padded").mkdir()
    megatron_writing.save(padded, {"": tensors}, folder / "padded")
    expected = [tensors[name][:67].clone() for name in rows]
    parallel.stop(groups)
    to_hugging_face(folder / "padded", folder / "cut", folder / "dense", "float32", ports[0])
    written = load_file(folder / "cut" / "model.safetensors")
    for name, tensor in zip(("model.embed_tokens.weight", "lm_head.weight"), expected, strict=True):
        assert written[name].equal(tensor), name


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_wrong_models, args=(tmp_path, [free_port("127.0.0.1")])
    )
    process.start()
    process.join(200)
    assert process.exitcode == 0


def _train_and_hang(folder: Path, ports: list[int]) -> None:
    """Save once; start to save again and never end it."""
    import torch

    from mopd.student.files import TensorWriter

    torch.set_num_threads(1)
    student = Context(0, 1, folder, ports).student("moe", world=1)
    student.step(make_samples(4), 0)
    student.save(folder / "run" / "last")
    student.step(make_samples(4, seed=1), 1)
    add, seen = TensorWriter.add, []

    def hang(writer: Any, name: str, tensor: Any) -> None:
        add(writer, name, tensor)
        seen.append(name)
        if len(seen) == len(student.family.shapes()) + 5:  # in the second file
            (folder / "hanging").touch()
            time.sleep(600)

    TensorWriter.add = hang  # type: ignore[method-assign]
    student.save(folder / "run" / "last")


def _resume(folder: Path, ports: list[int]) -> None:
    import torch
    from safetensors.torch import load_file

    from mopd.student.convert import to_hugging_face

    torch.set_num_threads(1)
    student = Context(0, 1, folder, ports).student("moe", world=1)
    student.load(folder / "run" / "last")
    assert student._optimizer.steps == 1
    student.step(make_samples(4, seed=1), 1)
    student.save(folder / "run" / "last")
    # A kill between the two renames of a save leaves the checkpoint under another name.
    (folder / "run" / "last").rename(folder / "run" / ".last.previous")
    student.load(folder / "run" / "last")
    assert student._optimizer.steps == 2
    # A run's checkpoint in Megatron's format becomes a Hugging Face folder too.
    student.config.checkpoint_format = "megatron"
    student.save(folder / "other")
    expected = student.weights.collect(student._parameters())
    student.close()
    # The whole step's folder is given, which has a state.json of the run's own.
    step = folder / "step_000002"
    step.mkdir()
    (folder / "other").rename(step / "student")
    (step / "state.json").write_text('{"step": 2}')
    to_hugging_face(step, folder / "hf", folder / "moe", "float32", ports[0])
    written = load_file(folder / "hf" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(written[name].equal(expected[name]) for name in expected)


@pytest.mark.timeout(300)
def test_a_killed_save_leaves_the_one_before(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "moe", "moe")
    spawn = multiprocessing.get_context("spawn")
    ports = [free_port("127.0.0.1")]
    first = spawn.Process(target=_train_and_hang, args=(tmp_path, ports))
    first.start()
    deadline = time.monotonic() + 120
    while not (tmp_path / "hanging").exists():
        assert first.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    saved = {f.name for f in (tmp_path / "run" / "last").iterdir()}
    first.kill()
    first.join()
    assert (tmp_path / "run" / ".last.partial").is_dir() and len(saved) == 5
    second = spawn.Process(target=_resume, args=(tmp_path, ports))
    second.start()
    second.join(120)
    assert second.exitcode == 0
    assert {f.name for f in (tmp_path / "run").iterdir()} == {"last"}

    back = tmp_path / "back"
    done = convert("to-hf", tmp_path / "run" / "last", back, "--like", tmp_path / "moe")
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(back)
