"""The student's loss beyond the sampled token: divergences, the fused head, several updates.

Each against the formula over transformers' own autograd, then the same numbers at tp 2 and dp 2.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "student"))

from student_harness import Context, launch, require_passed  # noqa: E402
from student_tiny import VALID, make_checkpoint, make_samples  # noqa: E402

from mopd.types import TopK, TrainSample  # noqa: E402

KINDS = ("moe", "tied", "dense")
TEMPERATURE, K = 0.7, 4
TEACHERS = {"a": "dense", "b": "moe"}
"""Domain -> the checkpoint that is its teacher, for whole distributions."""


def with_candidates(sample: TrainSample, seed: int) -> TrainSample:
    """A random teacher's and a random sampler's distribution at each position, cut to the top K."""
    random = np.random.default_rng(seed)
    r = len(sample.response_ids)
    sampled = np.asarray(sample.response_ids)[:, None]

    def distribution() -> np.ndarray:
        logits = random.normal(size=(r, VALID)) * 2
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    teacher, sampler = distribution(), distribution()
    best = np.argsort(-teacher, 1)[:, :K]
    others = np.argsort(-sampler, 1)[:, :K]
    listed = np.concatenate([sampled, np.where(others == sampled, -1, others)], 1)
    values = np.take_along_axis(sampler, np.maximum(listed, 0), 1) * (listed >= 0)
    return replace(
        sample,
        teacher_logprobs=tuple(np.take_along_axis(teacher, sampled, 1)[:, 0].tolist()),
        teacher_topk=TopK(
            best.astype(np.int32), np.take_along_axis(teacher, best, 1).astype(np.float32)
        ),
        sampler_logprobs=tuple(np.take_along_axis(sampler, sampled, 1)[:, 0].tolist()),
        sampler_topk=TopK(listed.astype(np.int32), values.astype(np.float32)),
    )


SAMPLES = [with_candidates(s, i) for i, s in enumerate(make_samples(6))]
WITHOUT_ORM = [replace(s, orm_advantage=0.0) for s in SAMPLES]


def divergence(logp: Any, logq: Any, direction: str) -> Any:
    """Sum over the last axis; beta 1/2."""
    p, q = logp.exp(), logq.exp()
    if direction == "reverse":
        return (p * (logp - logq)).sum(-1)
    if direction == "forward":
        return (q * (logq - logp)).sum(-1)
    logm = ((p + q) / 2).log()
    return ((q * (logq - logm)).sum(-1) + (p * (logp - logm)).sum(-1)) / 2


def topk_term(logp_RV: Any, sample: TrainSample, direction: str) -> Any:
    """[R] divergence over the listed ids (the sampled one among them) and one tail."""
    import torch

    terms = []
    for t, token in enumerate(sample.response_ids):
        known = {token: sample.teacher_logprobs[t]}
        known |= dict(
            zip(
                sample.teacher_topk.ids[t].tolist(),
                sample.teacher_topk.logprobs[t].tolist(),
                strict=True,
            )
        )
        ids = torch.tensor(list(known))
        logq = torch.tensor(list(known.values()), dtype=torch.float64)
        logp = logp_RV[t, ids]
        logq = torch.cat([logq, torch.log1p(-logq.exp().sum()).view(1)])
        logp = torch.cat([logp, torch.log1p(-logp.exp().sum()).view(1)])
        terms.append(divergence(logp, logq, direction))
    return torch.stack(terms)


def expected_gradients(c: Context, kind: str, term: Callable[[Any, TrainSample], Any]) -> Any:
    """Gradients, by name, of the sequence mean of term(log p [R, V] float64, sample) -> [R]."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(c.folder / kind, dtype=torch.float32)
    total = 0.0
    for sample in SAMPLES:
        logits = model(torch.tensor([[*sample.prompt_ids, *sample.response_ids]])).logits[0]
        logits = logits[len(sample.prompt_ids) - 1 : -1, :VALID].double()
        total = total + term((logits / TEMPERATURE).log_softmax(-1), sample).mean() / len(SAMPLES)
    total.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(c.folder / "gradients")
    return float(total), load_file(c.folder / "gradients" / "model.safetensors")


def student_gradients(
    c: Context, kind: str, samples: list[TrainSample], old: Any = None, **options: Any
) -> Any:
    """(loss, gradients by name) of a student made by `options`."""
    from mopd.student.updates import Before

    folders = {domain: c.folder / teacher for domain, teacher in TEACHERS.items()}
    rest = {"teacher_folders": folders}
    student = c.student(kind, temperature=TEMPERATURE, rest=rest, **options)
    loss, _ = student._updates.forward_backward(samples, Before(old=old))
    gradients = student.gradients()
    student.close()
    return loss, gradients


def require_same(got: Any, expected: Any, what: object, tolerance: float = 2e-5) -> None:
    (loss, gradients), (wanted_loss, wanted) = got, expected
    assert loss == pytest.approx(wanted_loss, rel=1e-5, abs=1e-6), what
    if gradients is None:
        return  # rank 0 alone holds them
    assert gradients, what
    for name, value in gradients.items():
        scale = max(wanted[name].abs().max().item(), 1e-2)
        error = (value - wanted[name]).abs().max().item()
        assert error <= tolerance * scale, (what, name, error, scale)


def alone(case: Callable[[Context], None]) -> Callable[[Context], None]:
    """Run by rank 0 as one process."""

    @functools.wraps(case)  # spawned processes find it under the case's name
    def run(c: Context) -> None:
        if c.rank == 0:
            case(c)

    return run


def signal(kind: str, direction: str) -> dict[str, Any]:
    top_k = {"top_k": K} if kind == "topk" else {}
    return {"teacher": {"signal": kind, "direction": direction, **top_k}}


@alone
def topk_equals_the_formula(c: Context) -> None:
    for kind, direction in (("moe", "reverse"), ("tied", "forward"), ("dense", "jsd")):
        expected = expected_gradients(c, kind, lambda p, s, d=direction: topk_term(p, s, d))
        objective = signal("topk", direction)
        got = student_gradients(c, kind, WITHOUT_ORM, world=1, objective=objective)
        require_same(got, expected, (kind, direction))


@alone
def full_equals_the_formula(c: Context) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    teachers = {
        domain: AutoModelForCausalLM.from_pretrained(c.folder / kind, dtype=torch.float32)
        for domain, kind in TEACHERS.items()
    }

    def term(logp_RV: Any, sample: TrainSample, direction: str) -> Any:
        with torch.no_grad():
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
            logits = teachers[sample.domain](ids).logits[0, len(sample.prompt_ids) - 1 : -1, :VALID]
        return divergence(logp_RV, logits.double().log_softmax(-1), direction)

    for kind, direction in (("moe", "reverse"), ("tied", "forward"), ("tied", "jsd")):
        expected = expected_gradients(c, kind, lambda p, s, d=direction: term(p, s, d))
        for head in ("logits", "fused"):
            got = student_gradients(
                c,
                kind,
                WITHOUT_ORM,
                world=1,
                objective=signal("full", direction),
                loss_head=head,
            )
            require_same(got, expected, (kind, direction, head))


@alone
def the_divergence_and_the_orm_part_add(c: Context) -> None:
    """Advantages are alpha A_ORM alone beside a divergence, weighted by pi / mu."""
    import torch

    def term(logp_RV: Any, sample: TrainSample) -> Any:
        logp = logp_RV.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        ratio = (logp.detach() - torch.tensor(sample.sampler_logprobs)).exp()
        orm = -ratio * sample.orm_advantage * logp
        return 0.3 * topk_term(logp_RV, sample, "reverse") + orm

    objective = {"teacher": {"signal": "topk", "top_k": K, "weight": 0.3}}
    got = student_gradients(c, "moe", SAMPLES, world=1, objective=objective)
    require_same(got, expected_gradients(c, "moe", term), "sum")


@alone
def ratios_are_to_the_batchs_start(c: Context) -> None:
    """PPO's clip with a pi_old that is not pi; truncation by pi_old / mu."""
    import torch

    random = np.random.default_rng(0)
    old: dict[str, list[float]] = {}
    clipped = [0]

    def term(logp_RV: Any, sample: TrainSample) -> Any:
        logp = logp_RV.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        shift = torch.tensor(random.normal(size=len(logp)) * 0.3)
        before = logp.detach() + shift
        old[sample.sample_id] = before.tolist()
        ratio = (logp - before).exp()
        weight = (before - torch.tensor(sample.sampler_logprobs)).exp()
        weight = weight * ((weight >= 0.1) & (weight <= 8.0))
        advantage = torch.tensor(sample.teacher_logprobs) - logp.detach()
        bound = ratio.clamp(0.8, 1.2) * advantage
        clipped[0] += int((bound < ratio * advantage).sum())
        return -weight * torch.minimum(ratio * advantage, bound)

    expected = expected_gradients(c, "moe", term)
    assert clipped[0] > 3
    objective = {
        "loss": {"name": "ppo"},
        "truncation": {"kind": "icepop", "low": 0.1, "high": 8.0},
        "teacher": {"clip": 0.0},
    }
    got = student_gradients(c, "moe", WITHOUT_ORM, old, world=1, objective=objective)
    require_same(got, expected, "ppo")


@alone
def c29_the_fused_head_gives_the_same_step(c: Context) -> None:
    for kind in ("moe", "tied"):
        base = student_gradients(c, kind, SAMPLES, world=1)
        for options in (
            {"loss_head": "fused"},
            {"fp32_head": True},
            {"loss_head": "fused", "fp32_head": True},
        ):
            got = student_gradients(c, kind, SAMPLES, world=1, **options)
            require_same(got, base, (kind, options), tolerance=5e-6)


@alone
def several_updates_a_batch(c: Context) -> None:
    """With pi / mu alone, two passes are two steps; with a ratio to pi_old they are not."""
    import torch

    constant = {"schedule": "constant", "warmup_steps": 0, "lr": 3e-3}

    def weights(steps: int, epochs: int, minibatches: int, **objective: Any) -> Any:
        student = c.student(
            "moe",
            world=1,
            optimizer=constant,
            objective=objective,
            rest={"epochs": epochs, "minibatches": minibatches},
        )
        for _ in range(steps):
            metrics = student.step(SAMPLES_BY_PROMPT, 0)
        tensors = student.weights.collect(student._parameters())
        found = torch.cat([t.flatten() for t in tensors.values()])
        student.close()
        return found, metrics

    twice, _ = weights(2, 1, 1)
    passes, metrics = weights(1, 2, 1)
    assert metrics["updates"] == 2 and metrics["sequences"] == 2 * len(SAMPLES)
    assert (twice - passes).abs().max() < 1e-6
    ppo = {"loss": {"name": "ppo"}, "truncation": {"kind": "none"}}
    twice, _ = weights(2, 1, 1, **ppo)
    passes, metrics = weights(1, 2, 1, **ppo)
    assert (twice - passes).abs().max() > 1e-4
    parts, metrics = weights(1, 2, 3, **ppo)
    assert metrics["updates"] == 6 and metrics["sequences"] == 2 * len(SAMPLES)


SAMPLES_BY_PROMPT = [replace(s, sample_id=f"0:{i // 2}:p:{i % 2}") for i, s in enumerate(SAMPLES)]

VARIANTS: dict[str, dict[str, Any]] = {
    "sampled, fused": {"loss_head": "fused"},
    "sampled, float32 head": {"fp32_head": True},
    "topk": {"objective": signal("topk", "reverse")},
    "full": {"objective": signal("full", "jsd")},
    "full, fused": {"objective": signal("full", "reverse"), "loss_head": "fused"},
    "dppo": {
        "objective": {
            "loss": {"name": "dppo_topk", "delta": 0.2},
            "truncation": {"kind": "none"},
            "teacher": {"top_k": K},
        }
    },
    "prompt mean": {"objective": {"aggregation": "prompt"}},
    "token mean": {"objective": {"aggregation": "token"}},
}


JUDGED = [
    replace(s, reward=float(i % 2) if i else None, reward_weight=0.5)
    for i, s in enumerate(SAMPLES_BY_PROMPT)
]
WITH_CRITIC = {
    "objective": {
        "teacher": {"weight": 0.0},
        "orm": {"estimator": "ppo_gae", "critic_lr": 0.05, "gae_lambda": 0.5},
        "loss": {"name": "ppo"},
    },
    "rest": {"epochs": 2},
}


@alone
def a_critic_goes_towards_its_returns(c: Context) -> None:
    student = c.student("moe", world=1, **WITH_CRITIC)
    rows = [student.step(JUDGED, step) for step in range(3)]
    student.save(c.folder / "critic")
    rows.append(student.step(JUDGED, 3))
    student.close()
    returns = [  # V = 0 at first, so that R_t = lambda^(T - 1 - t) r
        s.reward * 0.5 ** (len(s.response_ids) - 1 - t)
        for s in JUDGED
        if s.reward is not None
        for t in range(len(s.response_ids))
    ]
    expected = sum(r * r for r in returns) / 2 / len(returns)
    assert rows[0]["value_loss"] == pytest.approx(expected, rel=1e-5)
    assert rows[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert rows[3]["value_loss"] < 0.7 * rows[0]["value_loss"]
    c.kept["critic"] = rows


@alone
def one_process_is_the_reference(c: Context) -> None:
    c.kept["variants"] = {
        name: student_gradients(c, "moe", WEIGHTED, world=1, **options)
        for name, options in VARIANTS.items()
    }


WEIGHTED = [replace(s, weight=1.0 + 0.5 * (i % 2)) for i, s in enumerate(SAMPLES_BY_PROMPT)]
LAYOUTS: list[dict[str, int]] = [{"tp": 2}, {"dp": 2, "ep": 2}, {"pp": 2}]


def from_rank_zero(c: Context, key: str) -> Any:
    """What rank 0 kept when it was alone; the two meet here for good."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", init_method=f"file://{c.folder}/meet", rank=c.rank, world_size=c.world
        )
    box: list[Any] = [c.kept.get(key)]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def layouts_give_the_same_gradients(c: Context) -> None:
    reference = from_rank_zero(c, "variants")
    for name, options in VARIANTS.items():
        for layout in LAYOUTS:
            got = student_gradients(
                c, "moe", WEIGHTED, parallel=layout, micro_batch_size=2, **options
            )
            require_same(got, reference[name], (name, layout), tolerance=1e-5)


def a_critic_is_the_same_at_every_layout_and_resumes(c: Context) -> None:
    reference = from_rank_zero(c, "critic")

    def require_equal(got: Any, wanted: Any, what: object) -> None:
        for key in ("loss", "grad_norm", "value_loss", "explained_variance"):
            assert got[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-6), (what, key)

    for layout in LAYOUTS:
        student = c.student("moe", parallel=layout, **WITH_CRITIC)
        for step in range(2):
            require_equal(student.step(JUDGED, step), reference[step], (layout, step))
        student.load(c.folder / "critic")
        require_equal(student.step(JUDGED, 3), reference[3], (layout, "resumed"))
        student.close()


CASES = [
    topk_equals_the_formula,
    full_equals_the_formula,
    the_divergence_and_the_orm_part_add,
    ratios_are_to_the_batchs_start,
    c29_the_fused_head_gives_the_same_step,
    several_updates_a_batch,
    a_critic_goes_towards_its_returns,
    one_process_is_the_reference,
    layouts_give_the_same_gradients,
    a_critic_is_the_same_at_every_layout_and_resumes,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objectives")
    for kind in KINDS:
        make_checkpoint(folder / kind, kind)
    launch(2, folder, CASES)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_student_objectives(outcomes: Path, case: Callable[[Context], None]) -> None:
    require_passed(outcomes, case, 2)
