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
    assert "read 10/" in done.stdout or "read " in done.stdout
    assert (megatron / "metadata.json").is_file() and not list(tmp_path.glob(".*"))
    done = convert("to-hf", megatron, back, "--like", source)
    assert done.returncode == 0, done.stderr
    original, returned = (load_file(f / "model.safetensors") for f in (source, back))
    assert original.keys() == returned.keys()
    assert all(returned[name].equal(original[name]) for name in original)
    assert {f.name for f in back.iterdir()} == {f.name for f in source.iterdir()}

    other = make_checkpoint(tmp_path / "other", "deepseek", hidden_size=32)
    wrong = convert("to-hf", megatron, tmp_path / "wrong", "--like", other)
    assert wrong.returncode == 1 and "not a Megatron checkpoint of this model" in wrong.stderr
    assert not (tmp_path / "wrong").exists()


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
    to_hugging_face(folder / "other", folder / "hf", folder / "moe", "float32", ports[0])
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
