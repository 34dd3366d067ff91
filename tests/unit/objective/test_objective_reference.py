"""Any advantage x any loss x any truncation x any aggregation, against the float reference.

Batches and choices are drawn at random; so are extremes: ratios of e^+-200, rows of one token and
of none, NaN and infinities under the mask.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from objective_cases import REQUIRED, group_tokens, objective, tensor, totals_of
from objective_reference import BAND_DEFAULTS, Case, reference

from mopd.objective.inputs import StepTotals, TokenInputs
from mopd.objective.loss import objective_loss
from mopd.objective.policy_losses import POLICY_LOSSES, mopd
from mopd.objective.stats import TokenStats
from mopd.objective.truncation import TRUNCATIONS

LOSSES = sorted(POLICY_LOSSES)
QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


def inputs_of(case: Case, dtype: torch.dtype = torch.float64) -> TokenInputs:
    def maybe(array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else tensor(array, dtype)

    divergence = maybe(case.divergence)
    return TokenInputs(
        mask_BT=tensor(case.mask, torch.bool),
        sampler_logprobs_BT=tensor(case.sampler, dtype),
        orm_advantage_B=tensor(case.orm, dtype),
        old_logprobs_BT=maybe(case.old),
        teacher_logprobs_BT=maybe(case.teacher),
        reference_logprobs_BT=maybe(case.reference),
        divergence_BT=None if divergence is None else divergence.requires_grad_(),
        student_topk_BTK=maybe(case.student_topk),
        sampler_topk_BTK=maybe(case.sampler_topk),
        domain_weight_B=maybe(case.domain_weight),
        group_tokens_B=maybe(case.group_tokens),
    )


def config_of(case: Case):
    return objective(
        teacher={
            "weight": case.beta,
            "signal": case.signal,
            "clip": case.clip,
            "reward_to_go": case.reward_to_go,
            "refresh": case.refresh,
        },
        loss={"name": case.loss, **case.parameters},
        truncation={
            "kind": case.truncation,
            "low": case.low,
            "high": case.high,
            "ratio": case.ratio,
        },
        kl={"kind": case.kl, "weight": case.kl_weight},
        aggregation=case.aggregation,
        denominator=case.denominator,
        constant_length=case.constant_length,
    )


def evaluate(
    case: Case, dtype: torch.dtype = torch.float64
) -> tuple[float, np.ndarray, np.ndarray, TokenStats]:
    """(loss, dL/d log pi, dL/dD, statistics) of the code under test."""
    inputs = inputs_of(case, dtype)
    leaf = tensor(case.student, dtype).requires_grad_()
    loss, stats = objective_loss(
        leaf, inputs, config_of(case), StepTotals(case.tokens, case.sequences, case.prompts)
    )
    loss.backward()
    of_divergence = np.zeros(case.student.shape)
    if inputs.divergence_BT is not None and inputs.divergence_BT.grad is not None:
        of_divergence = inputs.divergence_BT.grad.numpy()
    return loss.item(), leaf.grad.numpy(), of_divergence, stats


def agree(case: Case) -> None:
    want = reference(case)
    loss, gradient, of_divergence, stats = evaluate(case)
    live = case.mask
    assert loss == pytest.approx(want.loss, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(gradient, want.gradient, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(of_divergence, want.divergence_gradient, rtol=1e-9, atol=1e-13)
    assert (gradient[~live] == 0).all() and (of_divergence[~live] == 0).all()
    assert (gradient[~want.kept] == 0).all(), "a dropped token gets exactly nothing"
    assert (stats.kept_BT.numpy() == want.kept).all()
    assert (stats.policy_clipped_BT.numpy() == want.bit).all()
    assert (stats.clipped_BT.numpy() == want.clipped).all()
    np.testing.assert_allclose(stats.advantage_BT.numpy(), want.advantage, rtol=1e-12, atol=1e-13)
    size = np.abs(want.gradient)
    if case.divergence is not None:
        size = size + np.abs(want.divergence_gradient * np.where(live, case.divergence, 0))
    np.testing.assert_allclose(stats.gradient_BT.numpy(), size, rtol=1e-9, atol=1e-12)


def draw_case(seed: int, b: int = 4, t: int = 5, spread: float = 0.5) -> Case:
    """A batch with everything in it; `spread` of the log-ratios."""
    rng = np.random.default_rng(seed)
    old = rng.uniform(-3, -0.2, (b, t))
    student = np.minimum(old + rng.normal(0, spread, (b, t)), -0.01)
    mask = rng.random((b, t)) < 0.7
    mask[0] = False  # an empty response
    mask[1] = np.arange(t) < 1  # a response of one token
    groups = np.arange(b) // 2
    totals = totals_of(mask, groups)
    topk = np.log(rng.dirichlet(np.ones(6), (2, b, t)))[..., :4]
    return Case(
        student=student,
        sampler=np.minimum(old + rng.normal(0, spread, (b, t)), -0.01),
        mask=mask,
        orm=rng.normal(0, 1, b),
        teacher=old + rng.normal(0, 2.5, (b, t)),
        old=old,
        student_topk=topk[0],
        sampler_topk=topk[1],
        domain_weight=rng.uniform(0.2, 3, b),
        group_tokens=group_tokens(mask, groups),
        tokens=totals.tokens,
        sequences=totals.sequences,
        prompts=totals.prompts,
    )


@pytest.mark.parametrize("truncation", sorted(TRUNCATIONS))
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_with_every_truncation(loss, truncation):
    bits, drops = 0, 0
    for seed, aggregation in enumerate(("token", "sequence", "prompt", "constant")):
        case = dataclasses.replace(
            draw_case(seed, b=6),
            loss=loss,
            parameters=REQUIRED.get(loss, {}),
            truncation=truncation,
            aggregation=aggregation,
            constant_length=9.0 if aggregation == "constant" else None,
        )
        agree(case)
        want = reference(case)
        bits, drops = bits + want.bit.sum(), drops + (case.mask & ~want.kept).sum()
    assert (drops > 0) == (truncation not in ("raw", "none", "tis")), "the band must be exercised"
    assert (bits > 0) == (loss not in ("mopd", "sapo", "kimi")), "the clip must be exercised"


@QUICK
@given(
    seed=st.integers(0, 10**6),
    b=st.integers(1, 5),
    t=st.integers(1, 6),
    spread=st.sampled_from([0.05, 0.5, 1.5]),
    loss=st.sampled_from(LOSSES),
    truncation=st.sampled_from(sorted(BAND_DEFAULTS)),
    ratio=st.sampled_from(["auto", "old", "current"]),
    aggregation=st.sampled_from(["token", "sequence", "prompt", "constant"]),
    kept_counts=st.booleans(),
    first_update=st.booleans(),
    signal=st.sampled_from(["sampled", "sampled", "topk", "full"]),
    beta=st.sampled_from([1.0, 1.0, 0.3, 0.0]),
    clip=st.sampled_from([5.0, 1.0, 0.0]),
    reward_to_go=st.booleans(),
    refresh=st.booleans(),
    kl=st.sampled_from(["none", "k2", "k3"]),
    own_reference=st.booleans(),
    orm_by_token=st.booleans(),
)
def test_any_choices(
    seed, b, t, spread, loss, truncation, ratio, aggregation, kept_counts, first_update, signal,
    beta, clip, reward_to_go, refresh, kl, own_reference, orm_by_token,
):  # fmt: skip
    case = draw_case(seed, b + 1, t, spread)
    rng = np.random.default_rng(seed + 1)
    shape = case.student.shape
    if ratio == "current" and loss not in ("mopd", "kimi"):
        ratio = "auto"  # refused: test_objective_names
    agree(
        dataclasses.replace(
            case,
            loss=loss,
            parameters=REQUIRED.get(loss, {}),
            truncation=truncation,
            ratio=ratio,
            old=None if first_update else case.old,
            aggregation=aggregation,
            denominator="kept" if kept_counts and aggregation == "sequence" else "response",
            constant_length=7.0 if aggregation == "constant" else None,
            signal=signal,
            beta=beta,
            divergence=rng.uniform(0, 2, shape) if signal != "sampled" and beta else None,
            clip=clip,
            reward_to_go=reward_to_go,
            refresh=refresh,
            kl=kl,
            kl_weight=0.2,
            reference=case.old + rng.normal(0, 0.5, shape) if own_reference else None,
            orm=rng.normal(0, 1, shape) if orm_by_token else case.orm,
        )
    )


EXTREMES = [200.0, -200.0, 60.0, -60.0]


@QUICK
@given(
    seed=st.integers(0, 10**6),
    loss=st.sampled_from([name for name in LOSSES if name != "dppo_kl"]),
    truncation=st.sampled_from(sorted(BAND_DEFAULTS)),
    where=st.sampled_from(["sampler", "old", "teacher"]),
    data=st.data(),
)
def test_extreme_ratios(seed, loss, truncation, where, data):
    """e^+-200 between any two policies, at some tokens: finite, and the formula's."""
    case = draw_case(seed, spread=0.3)
    array = getattr(case, where).copy()
    for i, t in zip(*np.nonzero(case.mask), strict=True):
        if data.draw(st.booleans()):
            array[i, t] = case.student[i, t] + data.draw(st.sampled_from(EXTREMES))
    case = dataclasses.replace(
        case,
        loss=loss,
        parameters=REQUIRED.get(loss, {}),
        truncation=truncation,
        **{where: array},
    )
    loss_value, gradient, _, _ = evaluate(case)
    assert math.isfinite(loss_value) and np.isfinite(gradient).all()
    agree(case)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e10])
@pytest.mark.parametrize("loss", LOSSES)
def test_c07_any_tensor_may_hold_anything_at_dead_tokens(loss, junk):
    case = draw_case(3)
    case = dataclasses.replace(
        case,
        loss=loss,
        parameters=REQUIRED.get(loss, {}),
        kl="k3",
        kl_weight=0.3,
        reference=case.old - 0.1,
        divergence=np.abs(case.old),
        signal="full",
        orm=np.random.default_rng(0).normal(0, 1, case.student.shape),
        aggregation="prompt",
    )
    dead_rows = ~case.mask.any(1)
    filled = {}
    for name in ("student", "sampler", "old", "teacher", "reference", "divergence", "orm"):
        filled[name] = np.where(case.mask, getattr(case, name), junk)
    for name in ("student_topk", "sampler_topk"):
        filled[name] = np.where(case.mask[..., None], getattr(case, name), junk)
    for name in ("domain_weight", "group_tokens"):
        filled[name] = np.where(dead_rows, junk, getattr(case, name))
    want, got = evaluate(case), evaluate(dataclasses.replace(case, **filled))
    assert got[0] == want[0] and math.isfinite(want[0])
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[2], want[2])
    for name, expected in vars(want[3]).items():
        if expected is not None:
            assert torch.equal(getattr(got[3], name), expected), name
            assert not expected.requires_grad


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
@pytest.mark.parametrize("loss", LOSSES)
def test_any_split_into_micro_batches_adds_up(loss, aggregation):
    """C21: rows in any order, in parts of any size, some parts without a live token."""
    case = draw_case(11, b=9)
    case = dataclasses.replace(
        case,
        loss=loss,
        parameters=REQUIRED.get(loss, {}),
        aggregation=aggregation,
        constant_length=6.0 if aggregation == "constant" else None,
        kl="k2",
        kl_weight=0.1,
    )
    whole_loss, whole, _, whole_stats = evaluate(case)
    rng = np.random.default_rng(5)
    for _ in range(3):
        order = rng.permutation(9)
        order = np.concatenate([[0], order[order != 0]])  # row 0 is empty: a part of its own
        cuts = [1, *sorted(rng.choice(np.arange(2, 9), size=rng.integers(1, 5), replace=False))]
        loss_value, gradient, prompts = 0.0, np.zeros_like(whole), 0.0
        for part in np.split(order, cuts):
            rows = {
                name: value[part]
                for name, value in vars(case).items()
                if isinstance(value, np.ndarray)
            }
            piece, piece_gradient, _, stats = evaluate(dataclasses.replace(case, **rows))
            loss_value += piece
            gradient[part] = piece_gradient
            prompts += stats.prompt_share_B.sum().item()
        assert loss_value == pytest.approx(whole_loss, abs=1e-13)
        np.testing.assert_allclose(gradient, whole, rtol=0, atol=1e-14)
        assert prompts == pytest.approx(case.prompts) and prompts >= 2


@pytest.mark.parametrize("loss", LOSSES)
def test_the_first_update_is_the_policy_gradient(loss):
    """At pi = pi_old = mu every loss has the gradient A / |y| / N of MOPD."""
    case = draw_case(4, b=6)
    case = dataclasses.replace(case, student=case.old, sampler=case.old, domain_weight=None)
    if loss == "dppo_topk":
        case = dataclasses.replace(case, student_topk=case.sampler_topk)
    want = reference(case).gradient
    case = dataclasses.replace(case, old=None, loss=loss, parameters=REQUIRED.get(loss, {}))
    _, gradient, _, stats = evaluate(case)
    if loss == "gspo":  # the sequence's advantage at each of its tokens
        counts = np.maximum(case.mask.sum(1, keepdims=True), 1)
        want = np.where(case.mask, want.sum(1, keepdims=True) / counts, 0.0)
    np.testing.assert_allclose(gradient, want, atol=1e-13)
    assert not stats.policy_clipped_BT.any() and np.any(want != 0)


def test_float32_inputs_agree_with_float64():
    for loss in LOSSES:
        case = draw_case(8)
        case = dataclasses.replace(case, loss=loss, parameters=REQUIRED.get(loss, {}))
        want, got = evaluate(case), evaluate(case, torch.float32)
        assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-6)
        assert got[1].dtype == np.float32


def test_ratios_of_bfloat16_logprobs_are_formed_in_float32():
    """log pi = -1 in bfloat16, log mu = -1.001: a bfloat16 difference would be 0."""
    inputs = TokenInputs(
        mask_BT=torch.ones(1, 1, dtype=torch.bool),
        sampler_logprobs_BT=torch.tensor([[-1.001]]),
        orm_advantage_B=torch.tensor([1.0]),
    )
    student = torch.tensor([[-1.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = objective_loss(
        student, inputs, objective(teacher={"weight": 0.0}), StepTotals(1, 1, 1)
    )
    assert loss.item() == pytest.approx(math.exp(0.001), abs=1e-6)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("beta", [1.0, 0.0])
@pytest.mark.parametrize(
    "where",
    ["student", "sampler", "old", "teacher", "reference", "divergence", "orm", "student_topk",
     "sampler_topk"],
)  # fmt: skip
def test_a_nan_in_a_live_token_is_never_a_dropped_or_a_kept_one(where, beta, dropped):
    """Every tensor that the loss reads, at kept tokens and dropped ones: the loss is NaN, so that
    the step is refused."""
    if not beta and where in ("teacher", "divergence"):
        return
    case = draw_case(6)
    i, t = (int(axis[-1]) for axis in np.nonzero(case.mask))
    sampler = case.old.copy()
    sampler[i, t] += 9.0 if dropped else 0.0
    case = dataclasses.replace(
        case,
        loss="dppo_topk",
        parameters={"delta": 0.1},
        kl="k2",
        kl_weight=0.1,
        reference=case.old - 0.1,
        signal="topk" if where == "divergence" else "sampled",
        divergence=np.abs(case.old),
        orm=np.zeros(case.student.shape),
        sampler=sampler,
        beta=beta,
    )
    value, _, _, stats = evaluate(case)
    assert math.isfinite(value) and stats.kept_BT[i, t].item() is not dropped
    array = getattr(case, where).copy()
    array[i, t] = [-1.0, math.nan, -2.0, -3.0] if array.ndim == 3 else math.nan
    assert math.isnan(evaluate(dataclasses.replace(case, **{where: array}))[0])


@pytest.mark.parametrize("junk", [-math.inf, math.inf])
@pytest.mark.parametrize("where", ["teacher", "orm", "old"])
@pytest.mark.parametrize("loss", LOSSES)
def test_infinities_of_a_dropped_token_reach_no_other_token(loss, where, junk):
    """Through GSPO's sequence ratio a 0 weight would meet them in the backward."""
    case = draw_case(6)
    i, t = (int(axis[-1]) for axis in np.nonzero(case.mask))
    case = dataclasses.replace(
        case,
        loss=loss,
        parameters=REQUIRED.get(loss, {}),
        clip=0.0,
        orm=np.zeros(case.student.shape),
        sampler=case.old.copy(),
    )
    case.sampler[i, t] += 9.0
    array = getattr(case, where).copy()
    array[i, t] = junk
    broken = dataclasses.replace(case, **{where: array})
    value, gradient, _, stats = evaluate(broken)
    assert not stats.kept_BT[i, t] and gradient[i, t] == 0
    assert math.isfinite(value) and np.isfinite(gradient).all()
    if where != "old":  # which is a part of the sequence's ratio
        agree(case)
        assert value == evaluate(case)[0]


def test_an_infinite_divergence_of_a_dropped_token_is_dropped_too():
    case = dataclasses.replace(draw_case(6), signal="full")
    i, t = (int(axis[-1]) for axis in np.nonzero(case.mask))
    case.sampler[i, t] = case.student[i, t] + 9.0
    infinite = np.abs(case.old)
    infinite[i, t] = math.inf
    value, gradient, of_divergence, stats = evaluate(dataclasses.replace(case, divergence=infinite))
    assert not stats.kept_BT[i, t] and of_divergence[i, t] == 0
    assert math.isfinite(value) and np.isfinite(gradient).all()
    assert np.isfinite(of_divergence).all() and np.abs(of_divergence).max() > 0
    assert stats.gradient_BT.isfinite().all()


def test_what_a_policy_loss_says_of_a_dropped_token_is_not_read(monkeypatch):
    case = draw_case(6)
    want = evaluate(case)

    def with_junk(inputs, parameters):
        objective_BT, bit_BT = mopd(inputs, parameters)
        return torch.where(inputs.kept_BT, objective_BT, math.nan), bit_BT

    monkeypatch.setitem(POLICY_LOSSES, "mopd", with_junk)
    got = evaluate(case)
    assert got[0] == want[0] and not want[3].kept_BT[torch.tensor(case.mask)].all()
    np.testing.assert_array_equal(got[1], want[1])


def test_a_nan_among_the_weights_is_not_lost():
    case = draw_case(6)
    for where in ("domain_weight", "group_tokens"):
        array = getattr(case, where).copy()
        array[-1] = math.nan
        broken = dataclasses.replace(case, aggregation="prompt", **{where: array})
        assert math.isnan(evaluate(broken)[0])


def test_gradients_flow_into_log_pi_and_the_divergence_alone():
    case = dataclasses.replace(
        draw_case(1), loss="kimi", parameters={"mu": 0.5}, kl="k3", kl_weight=0.1
    )
    case = dataclasses.replace(case, reference=case.old - 0.2)
    inputs = inputs_of(case)
    given = {
        name: value.clone().requires_grad_()
        for name, value in vars(inputs).items()
        if value is not None and value.is_floating_point()
        if name not in ("divergence_BT", "domain_weight_B", "group_tokens_B")
    }
    leaf = tensor(case.student).requires_grad_()
    totals = StepTotals(case.tokens, case.sequences, case.prompts)
    loss, stats = objective_loss(
        leaf, dataclasses.replace(inputs, **given), config_of(case), totals
    )
    gradients = torch.autograd.grad(loss, [leaf, *given.values()], allow_unused=True)
    assert gradients[0] is not None and gradients[0].abs().sum() > 0
    assert all(gradient is None for gradient in gradients[1:])
    assert not any(value.requires_grad for value in vars(stats).values() if value is not None)


def test_tensors_that_the_objective_does_not_read_may_be_broken():
    """A teacher that is there for the metrics only cannot stop a run of outcome rewards."""
    case = dataclasses.replace(draw_case(6), beta=0.0)
    want = evaluate(case)[0]
    case.teacher[case.mask] = math.nan
    assert evaluate(case)[0] == want


def test_refresh_takes_log_pi_of_now_and_is_the_identity_at_the_first_update():
    case = dataclasses.replace(draw_case(2), clip=0.0)
    now, then = (evaluate(dataclasses.replace(case, refresh=flag)) for flag in (True, False))
    moved = np.where(case.mask, case.student - case.old, 0.0)
    np.testing.assert_allclose(
        (then[3].advantage_BT - now[3].advantage_BT).numpy(), moved, atol=1e-13
    )
    assert np.abs(moved).max() > 0.1
    case = dataclasses.replace(case, old=None)
    first = [evaluate(dataclasses.replace(case, refresh=flag))[1] for flag in (True, False)]
    np.testing.assert_array_equal(first[0], first[1])


def test_the_two_ratios_differ_once_the_batch_has_moved_the_student():
    """Eq. 8 masks by pi/mu, IcePop's authors by pi_old/mu: one token each."""
    mask = np.ones((1, 2), bool)
    case = Case(
        student=np.array([[-1.0, -3.0]]),
        old=np.array([[-3.0, -1.0]]),
        sampler=np.array([[-1.0, -1.0]]),
        mask=mask,
        orm=np.array([1.0]),
        beta=0.0,
        tokens=2,
        sequences=1,
        prompts=1,
    )
    assert evaluate(case)[3].kept_BT.tolist() == [[True, False]]
    old = dataclasses.replace(case, ratio="old")
    assert evaluate(old)[3].kept_BT.tolist() == [[False, True]]
    ppo = dataclasses.replace(case, loss="ppo")
    assert evaluate(ppo)[3].kept_BT.tolist() == [[False, True]]
    # the gap between the engines is that of the same weights, whatever is masked by
    assert evaluate(case)[3].log_ratio_BT.tolist() == [[-2.0, 0.0]]
