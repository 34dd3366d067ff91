"""Every recipe on the quickstart's models, all parts real: 20 steps of finite, moving metrics.

Engine, teacher servers and verifiers are started once and serve one recipe after the other; each
recipe has Megatron ranks of its own, and the engine the base's weights again. SeqKD, which samples
its teachers, is run by the command.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mopd_process import QUICKSTART, ROOT, json_lines, run_mopd

RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
STEPS = 20
SMALL = [
    f"train.steps={STEPS}",
    "train.prompts_per_step=24",
    "evaluation.every=0",
    "evaluation.bootstrap=200",
    *(f"domains.{domain}.held_out=40" for domain in ("backward", "rotate", "caesar")),
    *(f"domains.{domain}.prompts.size=1500" for domain in ("backward", "rotate", "caesar")),
]

SHORTENED = {  # what a recipe plans for later than step 20, moved before it
    "kimi": ["objective.orm.length_reward.from_step=10"],
    "kimi_curriculum": [
        "objective.orm.length_reward.from_step=10",
        "train.sampling.curriculum_steps=10",
    ],
}


class Notes:
    """The loop's observer: keeps the metrics."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def stage(self, name: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Any]) -> None:
        self.rows.append({"step": step, **metrics})

    def warn(self, text: str) -> None: ...


def require_progress(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), name
    for row in rows:
        bad = {k: v for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        assert not bad, (name, row["step"], bad)
    for key in ("loss", "grad_norm", "tokens"):
        assert len({row[key] for row in rows}) > STEPS // 2, (name, key)
    # Of 32 samples and, where teachers answer, nearly all right: few values, but never one alone.
    assert len({row["domain/backward/reward"] for row in rows}) > 2, name
    assert all(row["grad_norm"] > 0 for row in rows), name
    rewards = [
        sum(row[f"domain/{d}/reward"] for d in ("backward", "rotate", "caesar")) / 3 for row in rows
    ]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    print(f"{name:18} reward {first:.3f} -> {last:.3f}", flush=True)


async def train_all(recipes: Sequence[Path], logs: Path) -> None:
    """The parts of `mopd.system`, those that no recipe changes started once."""
    import ray

    from mopd.build import prepare
    from mopd.config import load_config
    from mopd.config.objective_needs import support_of, teacher_top_k
    from mopd.credit import Credit
    from mopd.loop import Parts, train
    from mopd.runtime.cluster import ray_cluster
    from mopd.runtime.judge_pool import JudgePool
    from mopd.runtime.rollout_pool import RolloutPool
    from mopd.runtime.startup import Startup
    from mopd.runtime.student_group import StudentGroup
    from mopd.runtime.teacher_fleet import TeacherFleet
    from mopd.weight_sync.publish import VerifiedWeightSync

    configs = {
        r.stem: load_config([ROOT / QUICKSTART, r], [*SMALL, *SHORTENED.get(r.stem, [])])
        for r in recipes
    }
    plans = {name: prepare(config) for name, config in configs.items()}  # refused before a start
    reference = [
        "teachers.base={model: demo/models/base}",
        "objective.kl={kind: k2, weight: 1, reference: base}",
    ]
    base = load_config([ROOT / QUICKSTART], [*SMALL, *reference])
    prepared = prepare(base)
    startup = Startup(lambda _: None, lambda _: None, lambda _: None)
    weights = ROOT / base.student.model / "model.safetensors"

    async def nothing(step: int) -> None: ...

    with ray_cluster(base) as host:
        judge = JudgePool(prepared.judged(), prepared.decode, logs)
        engines = RolloutPool(base.rollout)
        needed = prepared.teacher_tokens()
        fleet = TeacherFleet(
            base, logs, host=host, needed_tokens=needed, tokenized=prepared.tokenized()
        )
        shared: dict[str, Any] = dict(
            valid_vocab=prepared.valid_vocab, seed=base.seed, log_dir=logs
        )
        try:
            await asyncio.gather(
                judge.ready(),
                fleet.start(startup, extra=["base"]),
                engines.build(
                    startup,
                    model=weights.parent,
                    config=base.rollout,
                    dtype="float32",
                    max_model_len=prepared.max_model_len,
                    vocab_size=prepared.limits.vocab_size,
                    eos_token_ids=prepared.eos_token_ids,
                    **shared,
                ),
            )
            for name, config in configs.items():
                # The same servers, asked for what this recipe wants to know of them.
                fleet._top_k, fleet._from_student = 0, False
                if top_k := teacher_top_k(config.objective):
                    fleet._from_student = support_of(config.objective) == "student"
                    fleet._top_k = 0 if fleet._from_student else top_k
                await engines.update_weights(weights, 0)
                own = plans[name]
                student = StudentGroup(2, threads=1, gpus=0, loopback=True)
                await student.build(
                    startup,
                    config=config.student,
                    objective=config.objective,
                    domains=list(config.domains),
                    total_steps=STEPS,
                    temperature=config.rollout.temperature,
                    pad_id=own.eos_token_ids[0],
                    epochs=config.train.epochs,
                    minibatches=config.train.minibatches,
                    teacher_folders=own.teachers_in_ranks(),
                    **shared,
                )
                sync = VerifiedWeightSync(student, engines, own.probe, max_logprob_error=1e-3)
                await sync.verify(0)
                notes = Notes()
                parts = Parts(
                    prompts=own.mixture(),
                    rollouts=engines,
                    teachers=fleet,
                    judge=judge,
                    credit=Credit(config),
                    student=student,
                    sync=sync,
                    evaluator=None,  # type: ignore[arg-type]  # evaluation.every is 0
                    observer=notes,
                    checkpoint=nothing,
                    refuse=own.refuse,
                )
                assert await train(parts, config) == STEPS
                require_progress(name, notes.rows)
                for actor in student._actors:
                    ray.kill(actor)
        finally:
            await fleet.close()


@pytest.mark.slow
def test_every_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    asyncio.run(train_all([r for r in RECIPES if r.stem != "seqkd"], tmp_path))


@pytest.mark.slow
def test_seqkd_trains(tmp_path: Path) -> None:
    recipe = ROOT / "configs" / "recipes" / "seqkd.yaml"
    run_mopd(
        ["train", QUICKSTART, str(recipe), f"run_dir={tmp_path}", "name=seqkd", *SMALL],
        tmp_path / "log",
        timeout_s=900,
    )
    require_progress("seqkd", json_lines(tmp_path / "seqkd" / "metrics.jsonl"))
