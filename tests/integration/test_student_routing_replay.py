"""R3 with a real vLLM engine: what it records is its own routing, and replaying it is exact.

The model is one that the student trained and saved: vLLM and transformers load it.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "student"))

from student_tiny import make_checkpoint  # noqa: E402


def _generate_and_replay(folder: Path) -> None:
    import random
    from dataclasses import replace

    import torch

    torch.set_num_threads(1)
    from student_harness import student_options
    from student_tiny import VALID, VOCAB, make_samples
    from transformers import AutoModelForCausalLM

    from mopd.config.schema import RolloutConfig
    from mopd.rollout.engine import RolloutEngine
    from mopd.student.trainer import StudentRank
    from mopd.types import Prompt, TrainSample

    config, objective, rest = student_options(folder / "mixed")  # the first layer is dense
    student = StudentRank(config, objective, **rest)
    student.step(make_samples(4), 2)
    model = folder / "trained"
    student.save_hf(model)
    student.close()
    engine = RolloutEngine(
        model,
        RolloutConfig(max_response_tokens=20, max_num_seqs=8),
        dtype="float32",
        max_model_len=64,
        valid_vocab=VALID,
        vocab_size=VOCAB,
        eos_token_ids=[1],
        seed=0,
        record_routes=True,
    )
    draw = random.Random(0)
    shared = tuple(draw.randrange(2, VALID) for _ in range(16))  # a prefix that could be cached
    prompts = [
        Prompt(f"a/{i}", "a", "", shared + tuple(draw.randrange(2, VALID) for _ in range(i % 7)))
        for i in range(20)
    ]
    requests = [(f"0:{i}:a-{i}:0", prompt) for i, prompt in enumerate(prompts)]
    rollouts = [
        r for group in engine.generate(requests, temperature=1.0, max_tokens=20) for r in group
    ]
    assert len(rollouts) == 20
    assert len({len(r.response_ids) for r in rollouts}) > 1  # they left the batch one by one
    engine.logprobs([((2, 3), (4, 5))])  # leaves nothing behind

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    equal = total = 0
    samples = []
    for r in rollouts:
        ids = [*r.prompt.token_ids, *r.response_ids]
        assert r.routed_experts.shape == (len(ids) - 1, 2, 2)
        assert not r.routed_experts[:, 0].any()  # dense
        with torch.no_grad():
            logits = hf(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits[-1]
        own = logits.topk(2, -1).indices.sort(-1).values
        recorded = torch.from_numpy(r.routed_experts[:, 1].astype("int64")).sort(-1).values
        equal += int((own == recorded).all(-1).sum())
        total += len(own)
        samples.append(
            TrainSample(
                r.sample_id,
                "a",
                r.prompt.token_ids,
                r.response_ids,
                r.sampler_logprobs,
                r.sampler_logprobs,
                0.1,
                routed_experts=r.routed_experts,
            )
        )
    assert equal >= 0.99 * total, (equal, total)

    config, objective, rest = student_options(model, routing_replay=True)
    student = StudentRank(config, objective, **rest)
    sequences = [(s.prompt_ids, s.response_ids) for s in samples]

    def gap(changed: list[TrainSample]) -> float:
        values = student.logprobs(sequences, whole_head=False, samples=changed)
        return max(
            abs(x - y)
            for row, s in zip(values, samples, strict=True)
            for x, y in zip(row, s.sampler_logprobs, strict=True)
        )

    assert gap(samples) < 1e-4
    elsewhere = [replace(s, routed_experts=(s.routed_experts + 1) % 8) for s in samples]
    assert gap(elsewhere) > 0.1
    assert student.step(samples, 0)["grad_norm"] > 0
    (folder / "passed").touch()


@pytest.mark.timeout(300)
def test_the_rollouts_own_routes_come_back(tmp_path: Path) -> None:
    # vLLM's attention on the CPU wants heads of 32 or more.
    make_checkpoint(tmp_path / "mixed", "mixed", head_dim=32)
    process = multiprocessing.get_context("spawn").Process(
        target=_generate_and_replay, args=(tmp_path,)
    )
    process.start()
    process.join(240)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0 and (tmp_path / "passed").exists()
