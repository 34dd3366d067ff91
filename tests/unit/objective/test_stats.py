"""Metrics: values written out by hand, sums that add over any split, finite when empty."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from objective_cases import group_tokens, objective, run, tensor, totals_of

from mopd.objective.inputs import TokenInputs
from mopd.objective.stats import SUM_COLUMNS, domain_sums, summarise

NAMES = ["spell", "sum", "empty"]


def batch(seed: int = 0, b: int = 8, t: int = 6):
    rng = np.random.default_rng(seed)
    student = rng.uniform(-4, -0.05, (b, t))
    sampler = student + rng.normal(0, 0.7, (b, t))
    teacher = student + rng.normal(-0.5, 4, (b, t))
    mask = rng.random((b, t)) < 0.6
    mask[2] = False
    domain = rng.integers(0, 2, b)
    return student, sampler, teacher, mask, rng.normal(0, 1, b), domain, rng.random((b, t))


def sums_of(student, sampler, teacher, mask, orm, domain, entropy, with_entropy=True, totals=None):
    inputs = TokenInputs(
        mask_BT=torch.tensor(mask),
        sampler_logprobs_BT=torch.tensor(sampler),
        orm_advantage_B=torch.tensor(orm),
        teacher_logprobs_BT=torch.tensor(teacher),
        entropy_BT=torch.tensor(entropy) if with_entropy else None,
    )
    _, _, stats = run(student, inputs, objective(), totals)
    return domain_sums(stats, inputs.mask_BT, torch.tensor(domain), len(NAMES))


def test_every_metric_by_hand():
    student, sampler, teacher, mask, orm, domain, entropy = arrays = batch()
    metrics = summarise(sums_of(*arrays), NAMES)
    all_tokens = int(mask.sum())
    for index, name in [(0, "spell"), (1, "sum"), (None, None)]:
        rows = np.ones(len(domain), bool) if index is None else domain == index
        cells = [(i, t) for i, t in zip(*np.nonzero(mask), strict=True) if rows[i]]
        distil = [teacher[c] - student[c] for c in cells]
        advantage = [min(max(d, -5), 5) + orm[c[0]] for d, c in zip(distil, cells, strict=True)]
        log_ratio = [student[c] - sampler[c] for c in cells]
        sequences = len({i for i, _ in cells})
        want = {
            "reverse_kl": -np.mean(distil),
            "advantage_mean": np.mean(advantage),
            "advantage_std": np.std(advantage),
            "clip_fraction": np.mean([abs(d) > 5 for d in distil]),
            "mask_fraction": np.mean([not 0.5 <= math.exp(x) <= 5 for x in log_ratio]),
            "tokens": len(cells),
            "sequences": sequences,
            "entropy": np.mean([entropy[c] for c in cells]),
        }
        k1 = np.mean([-x for x in log_ratio])
        k3 = np.mean([math.exp(x) - 1 - x for x in log_ratio])
        if name is None:
            prefix, want = "", want | {"train_rollout_kl_k1": k1, "train_rollout_kl_k3": k3}
        else:
            prefix = f"domain/{name}/"
            want |= {"k1": k1, "k3": k3, "token_share": len(cells) / all_tokens}
            want["response_length"] = len(cells) / sequences
        for key, value in want.items():
            assert metrics[prefix + key] == pytest.approx(value, abs=1e-12), prefix + key
    assert metrics["mask_fraction"] > 0 and metrics["clip_fraction"] > 0
    assert metrics["nonfinite_tokens"] == 0


def test_shares_and_what_comes_with_several_updates_by_hand():
    """ppo on a batch's second update: pi, pi_old and mu differ; four prompts of two answers."""
    student, sampler, teacher, mask, orm, domain, _ = batch(9)
    rng = np.random.default_rng(1)
    old = student + rng.normal(0, 0.3, student.shape)
    groups = np.arange(8) // 2
    domain = np.array([0, 0, 0, 0, 1, 1, 0, 0])
    inputs = TokenInputs(
        mask_BT=torch.tensor(mask),
        sampler_logprobs_BT=torch.tensor(sampler),
        orm_advantage_B=torch.tensor(orm),
        old_logprobs_BT=torch.tensor(old),
        teacher_logprobs_BT=torch.tensor(teacher),
        group_tokens_B=torch.tensor(group_tokens(mask, groups)),
        domain_weight_B=torch.tensor(np.where(domain == 0, 0.5, 3.0)),
    )
    config = objective(
        loss={"name": "ppo"},
        aggregation="token",
        truncation={"kind": "none"},
        kl={"kind": "k2", "weight": 0.1},
    )
    _, gradient, stats = run(student, inputs, config, totals_of(mask, groups))
    sums = domain_sums(stats, inputs.mask_BT, torch.tensor(domain), 3)
    assert sums[:, SUM_COLUMNS.index("prompts")].tolist() == pytest.approx([3, 1, 0])
    metrics = summarise(sums, NAMES)

    gradient = np.abs(gradient.numpy())
    for index, name in ((0, "spell"), (1, "sum")):
        cells = mask & (domain == index)[:, None]
        distil = np.clip(teacher - student, -5, 5)
        advantage, moved = distil + orm[:, None], student - old
        ratio = np.exp(moved)
        cut = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
        want = {
            "gradient_share": gradient[cells].sum() / gradient.sum(),
            "prompt_share": 0.75 if index == 0 else 0.25,
            "token_share": cells.sum() / mask.sum(),
            "gap": np.abs(distil[cells]).mean(),
            "policy_clip_fraction": cut[cells].mean(),
            "policy_update_k3": (ratio - 1 - moved)[cells].mean(),
            "reference_kl": ((student - teacher) ** 2 / 2)[cells].mean(),
            "k1": -(old - sampler)[cells].mean(),
        }
        for key, value in want.items():
            assert metrics[f"domain/{name}/{key}"] == pytest.approx(value, abs=1e-12), key
    assert 0.05 < metrics["domain/sum/gradient_share"] < 0.95
    assert metrics["policy_clip_fraction"] > 0 and metrics["policy_update_k3"] > 0
    assert metrics["domain/empty/gap"] == 0 == metrics["domain/empty/prompt_share"]


def test_the_gradient_share_of_divergences_and_no_reverse_kl_without_a_teacher():
    mask = np.array([[True, True], [True, False]])
    inputs = TokenInputs(
        mask_BT=torch.tensor(mask),
        sampler_logprobs_BT=tensor([[-1.0, -9.0], [-1.0, 0.0]]),  # the second is dropped
        orm_advantage_B=tensor([0.0, 0.5]),
        divergence_BT=tensor([[3.0, 7.0], [2.0, math.nan]]).requires_grad_(),
    )
    config = objective(teacher={"signal": "full", "weight": 0.5})
    loss, gradient, stats = run(np.full((2, 2), -1.0), inputs, config)
    # rows: .5 * 3 / 2 and (.5 * 2 + .5) / 1, over two sequences
    assert loss == pytest.approx((1.5 / 2 + 1.0 + 0.5) / 2)
    assert gradient.tolist() == [[0.0, 0.0], [-0.25, 0.0]]
    sums = domain_sums(stats, inputs.mask_BT, torch.tensor([0, 1]), 3)
    metrics = summarise(sums, NAMES)
    assert metrics["domain/spell/gradient_share"] == pytest.approx(0.75 / 2.25)
    assert metrics["domain/sum/gradient_share"] == pytest.approx(1.5 / 2.25)
    assert metrics["domain/spell/gap"] == 5.0 and metrics["gap"] == 4.0
    missing = ("reverse_kl", "entropy", "reference_kl", "prompt_share")
    assert not any(key.endswith(missing) for key in metrics)


def test_gradient_share_is_the_starvation_of_a_token_mean():
    """Answers of 80 and 4 tokens with equal advantages: 4/84 of the gradient, 1/2 of the prompts;
    weights of .525 and 10.5 make it 1/2."""
    mask = np.arange(80) < np.array([[80], [4]])
    flat = np.full(mask.shape, -1.0)
    for weight, share in ((None, 4 / 84), ([0.525, 10.5], 0.5)):
        inputs = TokenInputs(
            mask_BT=torch.tensor(mask),
            sampler_logprobs_BT=tensor(flat),
            orm_advantage_B=tensor([0.0, 0.0]),
            teacher_logprobs_BT=tensor(flat + np.array([[1.0], [-1.0]])),
            group_tokens_B=tensor([80, 4]),
            domain_weight_B=None if weight is None else tensor(weight),
        )
        _, _, stats = run(flat, inputs, objective(aggregation="token"))
        metrics = summarise(domain_sums(stats, inputs.mask_BT, torch.tensor([0, 1]), 3), NAMES)
        assert metrics["domain/sum/gradient_share"] == pytest.approx(share)
        assert metrics["domain/sum/prompt_share"] == 0.5


def test_k1_and_k3_estimate_kl_of_sampler_from_trainer():
    """Weighted by mu, by enumeration: both give KL(mu || pi)."""
    mu, pi = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.25, 0.25])
    exact = float((mu * np.log(mu / pi)).sum())
    got = {"k1": 0.0, "k3": 0.0}
    for y in range(3):
        one = np.array([[np.log(pi[y])]]), np.array([[np.log(mu[y])]]), np.zeros((1, 1))
        mask = np.ones((1, 1), bool)
        metrics = summarise(
            sums_of(*one, mask, np.zeros(1), np.zeros(1, int), np.zeros((1, 1))), NAMES
        )
        for key in got:
            got[key] += mu[y] * metrics[f"domain/spell/{key}"]
    assert got["k1"] == pytest.approx(exact, abs=1e-12)
    assert got["k3"] == pytest.approx(exact, abs=1e-12)


def test_sums_add_over_any_split():
    arrays = batch(3, b=10)
    totals = totals_of(arrays[3])
    whole = sums_of(*arrays)
    assert whole.shape == (3, len(SUM_COLUMNS)) and whole.dtype == torch.float64
    for parts in ([[0, 3], [1, 2, 4, 5, 6, 7, 8, 9]], [[9], [8, 0, 1], [2], [3, 4, 5, 6, 7]]):
        added = sum(sums_of(*[a[part] for a in arrays], totals=totals) for part in parts)
        torch.testing.assert_close(added, whole, rtol=1e-12, atol=1e-12)


def test_finite_when_empty_and_no_entropy_where_none_was_given():
    metrics = summarise(sums_of(*batch(1), with_entropy=False), NAMES)
    assert all(math.isfinite(value) for value in metrics.values())
    assert not any("entropy" in key for key in metrics)
    assert metrics["domain/empty/tokens"] == 0 == metrics["domain/empty/reverse_kl"]
    nothing = summarise(torch.zeros(3, len(SUM_COLUMNS), dtype=torch.float64), NAMES)
    assert set(nothing.values()) == {0.0}
    missing = {key.split("/")[-1] for key in set(metrics) - set(nothing)}
    assert missing == {"reverse_kl", "gap", "policy_update_k3"} and set(nothing) < set(metrics)


def test_infinite_tokens_are_counted_and_left_out_of_means():
    arrays = batch(5)
    student, sampler, _, mask, _, domain, _ = arrays
    i, t = (int(axis[0]) for axis in np.nonzero(mask))
    student[i, t] = -math.inf
    metrics = summarise(sums_of(*arrays), NAMES)
    assert metrics["nonfinite_tokens"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    finite = mask.copy()
    finite[i, t] = False
    want = np.mean((sampler - student)[finite])
    assert metrics["train_rollout_kl_k1"] == pytest.approx(want, abs=1e-12)
    assert metrics["tokens"] == mask.sum()


def test_a_teacher_that_calls_a_token_impossible_is_counted():
    """Its advantage is clipped and trains; its reverse KL is no number to average."""
    arrays = batch(5)
    student, _, teacher, mask, *_ = arrays
    i, t = (int(axis[0]) for axis in np.nonzero(mask))
    teacher[i, t] = -math.inf
    metrics = summarise(sums_of(*arrays), NAMES)
    assert metrics["nonfinite_tokens"] == 1
    finite = mask.copy()
    finite[i, t] = False
    assert metrics["reverse_kl"] == pytest.approx(np.mean((student - teacher)[finite]), abs=1e-12)


def test_c07_dead_tokens_never_reach_the_sums():
    arrays = batch(6)
    want = sums_of(*arrays)
    mask = arrays[3]
    for junk in (math.nan, math.inf, 1e10):
        filled = [a.copy() for a in arrays]
        for k in (0, 1, 2, 6):
            filled[k][~mask] = junk
        assert torch.equal(sums_of(*filled), want)


def test_names_must_match_the_sums():
    with pytest.raises(ValueError, match="domains"):
        summarise(torch.zeros(2, len(SUM_COLUMNS)), NAMES)


def test_a_metric_for_a_dtype_below_float64():
    """float32 inputs: the sums are still float64 and agree."""
    arrays = batch(7)
    single = [a.astype(np.float32) if a.dtype == np.float64 else a for a in arrays]
    got, want = sums_of(*single), sums_of(*arrays)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
