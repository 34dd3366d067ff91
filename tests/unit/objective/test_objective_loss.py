"""The objective against a float64 reference written from the formula, token by token."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from objective_cases import objective, totals_of
from objective_cases import run as run_objective

from mopd.errors import ConfigError
from mopd.objective.inputs import StepTotals, TokenInputs
from mopd.objective.loss import objective_loss

OPTIONS = {
    "icepop_low": 0.5,
    "icepop_high": 5.0,
    "advantage_clip": 5.0,
    "denominator": "response",
    "aggregation": "sequence",
}


def reference(student, sampler, teacher, mask, orm, num_sequences, **options):
    """Loss and dL/d log pi from L = -1/N sum_i 1/|y_i| sum_t w A log pi, in Python floats."""
    loss, gradient = 0.0, np.zeros(student.shape)
    for i in range(student.shape[0]):
        live = [t for t in range(student.shape[1]) if mask[i, t]]
        ratio = {t: math.exp(student[i, t] - sampler[i, t]) for t in live}
        kept = [t for t in live if options["icepop_low"] <= ratio[t] <= options["icepop_high"]]
        length = len(live) if options["denominator"] == "response" else len(kept)
        for t in kept:
            distil = teacher[i, t] - student[i, t]
            if options["advantage_clip"]:
                distil = min(max(distil, -options["advantage_clip"]), options["advantage_clip"])
            coefficient = ratio[t] * (distil + orm[i]) / (length * num_sequences)
            loss -= coefficient * student[i, t]
            gradient[i, t] = -coefficient
    return loss, gradient


def random_batch(seed: int, b: int = 5, t: int = 7):
    rng = np.random.default_rng(seed)
    student = rng.uniform(-4, -0.05, (b, t))
    sampler = student + rng.normal(0, 0.8, (b, t))
    teacher = student + rng.normal(0, 4, (b, t))
    mask = rng.random((b, t)) < 0.7
    mask[0] = False
    mask[1] = True
    return student, sampler, teacher, mask, rng.normal(0, 1, b)


def as_inputs(sampler, teacher, mask, orm, dtype=torch.float64) -> TokenInputs:
    return TokenInputs(
        mask_BT=torch.tensor(mask, dtype=torch.bool),
        sampler_logprobs_BT=torch.tensor(sampler, dtype=dtype),
        orm_advantage_B=torch.tensor(orm, dtype=dtype),
        teacher_logprobs_BT=torch.tensor(teacher, dtype=dtype),
    )


def run(student, inputs: TokenInputs, num_sequences: float, dtype=torch.float64, **options):
    given = {**OPTIONS, **options}
    config = objective(
        teacher={"clip": given["advantage_clip"]},
        truncation={"low": given["icepop_low"], "high": given["icepop_high"]},
        denominator=given["denominator"],
        aggregation=given["aggregation"],
    )
    live = totals_of(inputs.mask_BT.numpy())
    totals = StepTotals(live.tokens, num_sequences, live.prompts)
    return run_objective(student, inputs, config, totals, dtype)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("denominator", ["response", "kept"])
@pytest.mark.parametrize("clip", [0.0, 2.0])
def test_value_and_gradient_match_the_formula(seed, denominator, clip):
    student, sampler, teacher, mask, orm = random_batch(seed)
    options = {**OPTIONS, "denominator": denominator, "advantage_clip": clip}
    want_loss, want_grad = reference(student, sampler, teacher, mask, orm, 4, **options)
    loss, grad, stats = run(student, as_inputs(sampler, teacher, mask, orm), 4, **options)
    assert loss == pytest.approx(want_loss, abs=1e-12)
    np.testing.assert_allclose(grad.numpy(), want_grad, atol=1e-12)
    assert np.any(want_grad == 0) and np.any(want_grad != 0)
    kept = stats.kept_BT.numpy()
    assert kept.sum() < mask.sum(), "the batch must exercise the band"
    assert bool((stats.clipped_BT & inputs_mask(mask)).any()) == (clip > 0)


def inputs_mask(mask) -> torch.Tensor:
    return torch.tensor(mask, dtype=torch.bool)


def test_float32_and_bfloat16_logprobs_agree_with_float64():
    student, sampler, teacher, mask, orm = random_batch(3)
    sampler = student + 0.1  # away from the band's edges, where rounding decides
    want_loss, want_grad = reference(student, sampler, teacher, mask, orm, 4, **OPTIONS)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 3e-2)):
        inputs = as_inputs(sampler, teacher, mask, orm, torch.float32)
        loss, grad, _ = run(student, inputs, 4, dtype=dtype)
        assert loss == pytest.approx(want_loss, rel=tolerance)
        np.testing.assert_allclose(grad.double().numpy(), want_grad, atol=tolerance)
        assert grad.dtype == dtype


def test_check_value_of_the_sequence_mean():
    """MATH 6: lengths 2 and 8, per-token losses 1 and 0: sequence mean 0.5 (token mean .2)."""
    student = np.full((2, 8), -1.0)
    mask = np.ones((2, 8), bool)
    mask[0, 2:] = False
    teacher = student.copy()
    teacher[0] += 1.0  # A = 1, w = 1, log pi = -1: term 1
    loss, grad, _ = run(student, as_inputs(student, teacher, mask, [0.0, 0.0]), 2)
    assert loss == pytest.approx(0.5, abs=1e-15)
    assert grad[0, :2].tolist() == [-0.25, -0.25] and grad[1].abs().sum() == 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("denominator", ["response", "kept"])
def test_any_split_adds_up(seed, denominator):
    """C21's kind: micro-batches and ranks of any sizes sum to the whole step's gradient."""
    student, sampler, teacher, mask, orm = random_batch(seed, b=9)
    inputs = as_inputs(sampler, teacher, mask, orm)
    live = float(mask.any(1).sum())
    options = {"denominator": denominator}
    whole_loss, whole_grad, _ = run(student, inputs, live, **options)
    rng = np.random.default_rng(seed)
    order = rng.permutation(9)
    cuts = sorted(rng.choice(np.arange(1, 9), size=rng.integers(1, 8), replace=False))
    loss, grad = 0.0, torch.zeros_like(whole_grad)
    for part in np.split(order, cuts):
        pieces = [a[part] for a in (sampler, teacher, mask, orm)]
        piece_loss, piece_grad, _ = run(student[part], as_inputs(*pieces), live, **options)
        loss += piece_loss
        grad[part] = piece_grad
    assert loss == pytest.approx(whole_loss, abs=1e-13)
    torch.testing.assert_close(grad, whole_grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e10, -1e10])
@pytest.mark.parametrize("where", ["student", "sampler", "teacher", "orm", "entropy", "all"])
def test_c07_masked_positions_hold_anything(junk, where):
    student, sampler, teacher, mask, orm = random_batch(11)
    entropy = torch.rand(student.shape, dtype=torch.float64)

    def evaluate(filler: float):
        arrays = {
            "student": student.copy(),
            "sampler": sampler.copy(),
            "teacher": teacher.copy(),
            "entropy": entropy.numpy().copy(),
        }
        for name, array in arrays.items():
            array[~mask] = filler if where in (name, "all") else 0.0
        row_orm = orm.copy()
        row_orm[~mask.any(1)] = filler if where in ("orm", "all") else 0.0
        inputs = as_inputs(arrays["sampler"], arrays["teacher"], mask, row_orm)
        inputs = dataclasses.replace(inputs, entropy_BT=torch.tensor(arrays["entropy"]))
        return run(arrays["student"], inputs, 4)

    (loss, grad, stats), (want_loss, want_grad, want_stats) = evaluate(junk), evaluate(0.0)
    assert loss == want_loss and math.isfinite(loss)
    assert torch.equal(grad, want_grad) and grad.isfinite().all()
    assert (grad[~inputs_mask(mask)] == 0).all()
    for name, tensor in vars(stats).items():
        if tensor is None:
            assert getattr(want_stats, name) is None
            continue
        assert torch.equal(tensor, getattr(want_stats, name)), name
        assert not tensor.requires_grad


@pytest.mark.parametrize("num_sequences", [0.0, 3.0])
def test_c22_everything_masked(num_sequences):
    student = np.full((2, 3), math.nan)
    junk = np.full((2, 3), math.inf)
    mask = np.zeros((2, 3), bool)
    inputs = as_inputs(junk, junk, mask, [math.nan, 1.0])
    loss, grad, stats = run(student, inputs, num_sequences)
    assert loss == 0.0
    assert torch.equal(grad, torch.zeros_like(grad))
    assert not stats.kept_BT.any()
    empty_loss, _, _ = run(np.zeros((0, 3)), as_inputs(*np.zeros((3, 0, 3)), np.zeros(0)), 2.0)
    assert empty_loss == 0.0


def test_kept_denominator_with_nothing_kept_is_zero():
    student = np.full((1, 3), -1.0)
    sampler = student + 10
    inputs = as_inputs(sampler, student + 1, np.ones((1, 3), bool), [0.5])
    loss, grad, stats = run(student, inputs, 1, denominator="kept")
    assert loss == 0.0 and torch.equal(grad, torch.zeros_like(grad))
    assert not stats.kept_BT.any()


def test_c01_each_token_has_its_own_advantage():
    """R = [r1, r2] -> [T1-S1, T2-S2]; a one-token response gets its token's A, not 0."""
    student = np.array([[-1.0, -2.0], [-0.5, 0.0]])
    teacher = np.array([[-0.25, -2.5], [-1.5, 0.0]])
    mask = np.array([[True, True], [True, False]])
    _, grad, stats = run(student, as_inputs(student, teacher, mask, [0, 0]), 2)
    assert stats.advantage_BT.tolist() == [[0.75, -0.5], [-1.0, 0.0]]
    assert grad.tolist() == [[-0.75 / 4, 0.5 / 4], [0.5, 0.0]]


def test_c24_dropped_tokens_are_exactly_zero_and_kept_weight_is_the_ratio():
    log_ratio = np.array([[200.0, -200.0, math.log(2.0), 0.0]])
    student = np.full((1, 4), -1.0)
    student[0, 1] = -math.inf  # the student calls the sampled token impossible: ratio 0
    sampler = np.where(np.isinf(student), -1.0, student - log_ratio)
    teacher = np.full((1, 4), -0.5)
    for clip in (5.0, 0.0):
        inputs = as_inputs(sampler, teacher, np.ones((1, 4), bool), [0.0])
        loss, grad, stats = run(student, inputs, 1, advantage_clip=clip)
        assert grad[0, :2].tolist() == [0.0, 0.0]
        assert stats.kept_BT.tolist() == [[False, False, True, True]]
        assert grad[0, 2].item() == pytest.approx(-2.0 * 0.5 / 4, rel=1e-15)
        assert loss == pytest.approx((2.0 * 0.5 + 0.5) / 4, rel=1e-15)


def test_a_nan_in_a_live_token_is_never_a_dropped_token():
    student, sampler, teacher, mask, orm = random_batch(2)
    for array in (student, sampler, teacher):
        keep, array[1, 0] = array[1, 0], math.nan
        loss, _, _ = run(student, as_inputs(sampler, teacher, mask, orm), 4)
        assert math.isnan(loss)
        array[1, 0] = keep


def test_c20_teacher_shift_and_alpha_change_the_gradient_as_the_formula_says():
    student, sampler, teacher, mask, orm = random_batch(7)
    mask[:] = True
    sampler = student - math.log(1.5)  # w = 1.5 everywhere
    teacher = student + np.linspace(-1, 1, student.size).reshape(student.shape)
    zero = np.zeros(5)
    _, base, _ = run(student, as_inputs(sampler, teacher, mask, zero), 5)
    _, shifted, _ = run(student, as_inputs(sampler, teacher + 1, mask, zero), 5)
    _, with_orm, _ = run(student, as_inputs(sampler, teacher, mask, 1.0 * orm), 5)
    per_token = 1.5 / (7 * 5)
    np.testing.assert_allclose((shifted - base).numpy(), -per_token, atol=1e-13)
    np.testing.assert_allclose(
        (with_orm - base).numpy(), -per_token * np.repeat(orm[:, None], 7, 1), atol=1e-13
    )


def test_the_orm_part_is_outside_the_clip():
    student = np.array([[-1.0]])
    inputs = as_inputs(student, student + 100, np.ones((1, 1), bool), [2.0])
    _, grad, stats = run(student, inputs, 1)
    assert grad.item() == -7.0 and stats.clipped_BT.item() and stats.advantage_BT.item() == 7.0


@pytest.mark.parametrize(
    ("options", "key", "hint"),
    [
        ({"aggregation": "sequense"}, "objective.aggregation", "'sequence'"),
        ({"denominator": "respons"}, "objective.denominator", "'response'"),
        ({"icepop_low": 6.0}, "objective.truncation", "low <= high"),
        ({"icepop_low": -1.0}, "objective.truncation", "0 <="),
        ({"icepop_high": math.nan}, "objective.truncation", "expected"),
        ({"advantage_clip": -1.0}, "objective.teacher.clip", ">= 0"),
    ],
)
def test_bad_options_name_the_key(options, key, hint):
    student, sampler, teacher, mask, orm = random_batch(0)
    with pytest.raises(ConfigError) as error:
        run(student, as_inputs(sampler, teacher, mask, orm), 4, **options)
    assert key in str(error.value) and hint in str(error.value)


def test_bad_shapes_and_counts_are_refused():
    student, sampler, teacher, mask, orm = random_batch(0)
    good = as_inputs(sampler, teacher, mask, orm)
    topk = torch.zeros(5, 7, 3)
    for changes, word in (
        ({"teacher_logprobs_BT": torch.zeros(5, 6)}, "teacher_logprobs_BT is .5, 6."),
        ({"sampler_logprobs_BT": torch.zeros(5)}, "sampler"),
        ({"orm_advantage_B": torch.zeros(5, 6)}, "orm"),
        ({"orm_advantage_B": torch.zeros(4)}, "orm"),
        ({"mask_BT": good.mask_BT.double()}, "bool"),
        ({"domain_weight_B": torch.ones(5, 7)}, "domain_weight_B"),
        ({"group_tokens_B": torch.ones(4)}, "group_tokens_B"),
        ({"student_topk_BTK": topk[:, :6], "sampler_topk_BTK": topk[:, :6]}, "student_topk_BTK"),
        ({"student_topk_BTK": topk[..., 0], "sampler_topk_BTK": topk[..., 0]}, "student_topk_BTK"),
        ({"student_topk_BTK": topk, "sampler_topk_BTK": topk[..., :2]}, "differ in shape"),
        ({"student_topk_BTK": topk}, "one is missing"),
    ):
        with pytest.raises(ValueError, match=word):
            run(student, dataclasses.replace(good, **changes), 4)
    for num_sequences in (0.0, math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match=f"totals.sequences is {num_sequences}"):
            run(student, good, num_sequences)
    with pytest.raises(ValueError, match="expected .B, T."):
        flat = TokenInputs(good.mask_BT[0], good.sampler_logprobs_BT[0], torch.zeros(7))
        objective_loss(torch.zeros(7), flat, objective(), StepTotals(1, 1, 1))
