"""How far apart rollout engine and trainer are, by how the routers are treated (bfloat16).

    .venv/bin/python tools/bench_routing.py --json                   some ten minutes
    .venv/bin/python tools/bench_routing.py --json --head float32    half of it

The quickstart's student in bfloat16, one vLLM engine and one Megatron rank in this process, trained
for some steps on its own samples by outcome reward alone (no teacher), once for each row: routers
frozen or trained, rollout routing replay (R3) off or on, LM head in bfloat16 or float32. Each row
starts from the same weights and draws the same prompts. Over all tokens of all steps, before each
update: d = log pi_trainer - log mu_engine; k1 = mean(-d), k3 = mean(exp(d) - 1 - d), both
estimators of KL(mu || pi) with their standard errors, and the share of tokens that IcePop's band
[0.5, 5] drops. float32 has no such gap to speak of (k3 of 1e-12), which is why this is not the
quickstart's own dtype.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
ROUTERS = ((False, False), (True, False), (False, True), (True, True))
"""(frozen, replayed)."""


def samples_of(rollouts: list[Any], prepared: Any) -> list[Any]:
    """Training samples: advantage = right or wrong, less the mean of the batch."""
    from mopd.types import TrainSample

    right = [prepared.decode(r.response_ids).strip() == r.prompt.answer.strip() for r in rollouts]
    mean = sum(right) / len(right)
    return [
        TrainSample(
            r.sample_id,
            r.prompt.domain,
            r.prompt.token_ids,
            r.response_ids,
            r.sampler_logprobs,
            r.sampler_logprobs,  # no distillation: A is the outcome's alone
            orm_advantage=hit - mean,
            routed_experts=r.routed_experts,
        )
        for r, hit in zip(rollouts, right, strict=True)
    ]


def run_row(
    engine: Any, prepared: Any, row: tuple[bool, bool, bool], steps: int, count: int
) -> dict[str, float]:
    """Train one row; the gap between engine and trainer, averaged over its tokens."""
    import numpy as np

    from mopd.runtime.ports import free_port
    from mopd.student.trainer import StudentRank

    freeze, replay, head = row
    config = deepcopy(prepared.config)
    student_config = config.student
    student_config.freeze_routers, student_config.routing_replay = freeze, replay
    student_config.fp32_head = head
    student_config.parallel.dp = student_config.parallel.ep = 1
    student = StudentRank(
        config=student_config,
        objective=config.objective,
        domains=list(config.domains),
        total_steps=config.train.steps,
        temperature=1.0,
        valid_vocab=prepared.valid_vocab,
        pad_id=prepared.eos_token_ids[0],
        master_port=free_port("127.0.0.1"),
    )
    mixture, gaps = prepared.mixture(), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        for step in range(steps + 1):
            student.export(path)
            engine.update_weights(path, step)
            if step == steps:
                break
            requests = [(f"{step}:{i}:x:0", p) for i, p in enumerate(mixture.draw(count))]
            tokens = config.rollout.max_response_tokens
            groups = engine.generate(requests, temperature=1.0, max_tokens=tokens)
            samples = samples_of(sorted((r for g in groups for r in g), key=_order), prepared)
            values = student.logprobs(
                [(s.prompt_ids, s.response_ids) for s in samples],
                whole_head=False,
                samples=samples if replay else None,
            )
            for value, sample in zip(values, samples, strict=True):
                gaps += (np.array(value) - np.array(sample.sampler_logprobs)).tolist()
            # Warm-up is over: every step moves the weights by the same rate.
            student.step(samples, student_config.optimizer.warmup_steps + step)
    student.close()
    d = np.array(gaps)
    ratio = np.exp(d)
    k3, root = ratio - 1 - d, len(d) ** 0.5
    return {
        "k1": float(-d.mean()),
        "k1_error": float(d.std() / root),
        "k3": float(k3.mean()),
        "k3_error": float(k3.std() / root),
        "masked": float(((ratio < 0.5) | (ratio > 5)).mean()),
        "largest": float(abs(d).max()),
        "tokens": len(d),
    }


def _order(rollout: Any) -> int:
    return int(rollout.sample_id.split(":")[1])


def bench(head: bool, steps: int, count: int) -> list[dict[str, Any]]:
    """The rows of one head, with an engine whose head is the same."""
    import torch

    from mopd.build import prepare
    from mopd.config.load import load_config
    from mopd.rollout.engine import RolloutEngine

    torch.set_num_threads(1)
    prepared = prepare(load_config(["configs/quickstart.yaml"], ["student.dtype=bfloat16"]))
    engine = RolloutEngine(
        Path(prepared.config.student.model),
        prepared.config.rollout,
        dtype="bfloat16",
        max_model_len=prepared.max_model_len,
        valid_vocab=prepared.valid_vocab,
        vocab_size=prepared.limits.vocab_size,
        eos_token_ids=prepared.eos_token_ids,
        seed=0,
        record_routes=True,
        fp32_head=head,
    )
    rows = []
    for freeze, replay in ROUTERS:
        found = run_row(engine, prepared, (freeze, replay, head), steps, count)
        rows.append({"frozen": freeze, "replay": replay, "fp32_head": head, **found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples", type=int, default=384)
    parser.add_argument("--head", choices=("bfloat16", "float32", "both"), default="both")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    rows: list[dict[str, Any]] = []
    heads = {"bfloat16": [False], "float32": [True], "both": [False, True]}[arguments.head]
    for head in heads:
        # A process each: vLLM keeps its engine in globals.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows += pool.submit(bench, head, arguments.steps, arguments.samples).result()
    print("| routers | replay | head | k1, 1e-4 nats | k3, 1e-4 nats | masked | largest, nats |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {'frozen' if r['frozen'] else 'trained'} | {'on' if r['replay'] else 'off'} | "
            f"{'float32' if r['fp32_head'] else 'bfloat16'} | {1e4 * r['k1']:.2f} ± "
            f"{1e4 * r['k1_error']:.2f} | {1e4 * r['k3']:.2f} ± {1e4 * r['k3_error']:.2f} | "
            f"{r['masked']:.3%} | {r['largest']:.2f} |"
        )
    if arguments.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
