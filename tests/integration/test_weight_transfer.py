"""vLLM's weight-transfer API on a CPU: everything but the wire, which is a file here.

The engine is real and goes through vLLM's own start, update and finish; what NCCL or CUDA IPC would
bring into `receive_weights` is read from a checkpoint. The sender's source is held against what
vLLM's trainer side checks of it.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from test_rollout_pool import EOS, VALID, VOCAB, checkpoint, fingerprints

PROBE = [((3, 8, 13), (60, 2, 33)), ((5,), (17, 40))]


def _bucket(shapes: dict[str, list[int]], names: list[str]) -> dict[str, Any]:
    return {
        "names": names,
        "dtype_names": ["float32"] * len(names),
        "shapes": [shapes[name] for name in names],
    }


def _drive(a: Path, b: Path, pipe: Any) -> None:
    """In a process of its own: what an engine says, in order."""
    from safetensors.torch import load_file

    from mopd.config.schema import RolloutConfig
    from mopd.errors import WeightSyncError
    from mopd.rollout.engine import RolloutEngine
    from mopd.rollout.transfer import StudentSource

    engine = RolloutEngine(
        a,
        RolloutConfig(max_response_tokens=12),
        dtype="float32",
        max_model_len=64,
        valid_vocab=VALID,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        seed=0,
        transfer="nccl",
    )
    weights = load_file(b / "model.safetensors")
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    names = list(weights)

    def wire(worker: Any) -> None:
        transfer = worker.weight_transfer_engine

        def receive(info: Any) -> None:
            transfer.model.load_weights([(name, weights[name]) for name in info.names])

        transfer.receive_weights = receive

    engine._llm.collective_rpc(wire)

    def send(*buckets: list[str]) -> None:
        engine.transfer("start_weight_update", None)
        for bucket in buckets:
            engine.transfer("update_weights", _bucket(shapes, bucket))
        engine.transfer("finish_weight_update", None)

    seen: dict[str, Any] = {"before": engine.logprobs(PROBE)}
    send(names[:30], names[30:])
    proof = engine.update_weights(None, 1, fingerprints(b / "model.safetensors"), PROBE)
    seen["after"], seen["version"] = proof.logprobs, engine.weight_version
    for what, change in (
        ("stray", _bucket(shapes | {"stray": [2]}, ["stray"])),
        ("shape", _bucket(shapes | {"lm_head.weight": [VALID, 64]}, ["lm_head.weight"])),
    ):
        engine.transfer("start_weight_update", None)
        try:
            engine.transfer("update_weights", change)
        except WeightSyncError as error:
            seen[what] = str(error)
        engine._llm.collective_rpc("finish_weight_update")
    for what, buckets, sums in (
        ("missing", [names[:-1]], fingerprints(b / "model.safetensors")),
        ("other", [names], fingerprints(a / "model.safetensors")),
    ):
        send(*buckets)
        try:
            engine.update_weights(None, 2, sums, PROBE)
        except WeightSyncError as error:
            seen[what] = str(error)
        seen[f"version after {what}"] = engine.weight_version

    class Publisher:
        manifest = {name: (t.dtype, tuple(t.shape)) for name, t in weights.items()}

        def stream(self, bucket_bytes: int) -> Any:
            return iter(weights.items())

        everywhere = stream

    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    for everywhere in (False, True):
        source = StudentSource(Publisher(), everywhere=everywhere)
        checked = NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata())
        assert [name for name, _ in checked] == names
    pipe.send(seen)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("transfer")
    a, b = checkpoint(folder / "a", 0), checkpoint(folder / "b", 1)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_drive, args=(a, b, there))
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    finally:
        process.join(60)
    return found | {"a": a, "b": b}


def expected(path: Path) -> list[list[float]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = []
    for prompt, response in PROBE:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0]
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        out.append(logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist())
    return out


def test_what_was_sent_is_what_the_engine_holds(seen: dict[str, Any]) -> None:
    for when, path in (("before", seen["a"]), ("after", seen["b"])):
        for got, want in zip(seen[when], expected(path), strict=True):
            assert got == pytest.approx(want, abs=1e-4), when
    assert seen["version"] == 1


def test_c34_a_bucket_of_another_model_is_refused(seen: dict[str, Any]) -> None:
    assert "unexpected stray [2]" in seen["stray"]
    assert f"lm_head.weight: shape [{VALID}, 64], expected [{VOCAB}, 64]" in seen["shape"]


def test_what_never_came_or_came_wrong_is_named(seen: dict[str, Any]) -> None:
    assert "1 of " in seen["missing"] and "never came" in seen["missing"]
    assert "did not arrive as the trainer has them" in seen["other"]
    assert seen["version after missing"] == seen["version after other"] == -1
