"""IcePop: bounds included, exactly 0 outside, no overflow (C24)."""

from __future__ import annotations

import math

import pytest
import torch

from mopd.errors import ConfigError
from mopd.objective.truncation import TRUNCATIONS, icepop

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("low", "high"), [(0.5, 5.0), (0.2, 5.0), (0.5, 2.0), (1.0, 1.0)])
def test_c24_bounds_are_included_and_a_millionth_beyond_is_not(dtype, low, high):
    for bound, outward in ((low, -1e-6), (high, 1e-6)):
        log_bound = torch.tensor([bound], dtype=dtype).log()
        weight, kept = icepop(log_bound, low, high)
        assert kept.all() and weight.item() == pytest.approx(bound, rel=1e-6)
        weight, kept = icepop(log_bound + outward, low, high)
        assert not kept.any() and weight.item() == 0.0
        if low < high:
            weight, kept = icepop(log_bound - outward, low, high)
            assert kept.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_c24_extreme_ratios_are_exact_zeros(dtype):
    log_ratio = torch.tensor([200.0, -200.0, 1e4, math.inf, -math.inf, math.nan], dtype=dtype)
    for low, high in ((0.5, 5.0), (0.0, 5.0)):
        weight, kept = icepop(log_ratio, low, high)
        below = low == 0.0  # an open side keeps a tiny ratio, yet never a ratio of 0
        assert kept.tolist() == [False, below, False, False, False, False]
        assert weight[~kept].eq(0).all() and weight.isfinite().all()
    assert weight.dtype == dtype


def test_the_kept_weight_is_the_ratio_and_has_no_gradient():
    log_ratio = torch.linspace(-0.6, 1.6, 23, dtype=torch.float64, requires_grad=True)
    weight, kept = TRUNCATIONS["icepop"](log_ratio, torch.ones(23, dtype=torch.bool), 0.5, 5.0)
    assert kept.all() and not weight.requires_grad
    assert weight.tolist() == pytest.approx([math.exp(x) for x in log_ratio.tolist()], rel=1e-15)


def test_masked_fraction_of_a_normal_gap_is_the_one_of_the_formula():
    """MATH 2: Phi((ln a + s^2/2)/s) + 1 - Phi((ln b + s^2/2)/s) for N(-s^2/2, s^2)."""
    sigma = 0.5
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(200_000, generator=generator, dtype=torch.float64)
    log_ratio = -(sigma**2) / 2 + sigma * draws
    _, kept = icepop(log_ratio, 0.5, 5.0)

    def phi(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    edges = [(math.log(bound) + sigma**2 / 2) / sigma for bound in (0.5, 5.0)]
    assert 1 - kept.double().mean().item() == pytest.approx(
        phi(edges[0]) + 1 - phi(edges[1]), abs=2e-3
    )


@pytest.mark.parametrize(
    ("low", "high"), [(-0.1, 5.0), (5.0, 0.5), (math.nan, 5.0), (0.0, 0.0), (math.inf, math.inf)]
)
def test_impossible_bands_are_refused(low, high):
    with pytest.raises(ConfigError, match="objective.truncation"):
        icepop(torch.zeros(1), low, high)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", sorted(TRUNCATIONS))
def test_c24_every_kind_at_extremes_bounds_and_dead_tokens(kind, dtype):
    """Rows of one live token, the other dead and wild: what is kept, and exactly 0 elsewhere."""
    live = [200.0, -200.0, math.inf, -math.inf, math.nan, math.log(2.0), math.log(0.5), 0.3]
    log_ratio = torch.tensor([[x, math.nan] for x in live], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[True, False]]).expand(len(live), 2)
    low, high = {"icepop": (0.5, 2.0), "seq_mask": (0.5, 2.0)}.get(kind, (0.0, 2.0))
    if kind in ("raw", "none"):
        high = math.inf
    weight, kept = TRUNCATIONS[kind](log_ratio, mask, low, high)
    single = dtype == torch.float32  # e^200 is no float32
    big = {"tis": 2.0, "none": 1.0, "raw": 0.0 if single else math.exp(200)}.get(kind, 0.0)
    small = 1.0 if kind == "none" else 0.0 if single else math.exp(-200)
    small = 0.0 if kind in ("icepop", "seq_mask") else small
    want = [big, small, 0, 0, 0, *([1.0] * 3 if kind == "none" else [2.0, 0.5, math.exp(0.3)])]
    assert weight[:, 0].tolist() == pytest.approx(want, rel=1e-6)
    assert weight[:, 1].eq(0).all() and not kept[:, 1].any()
    assert weight[~kept].eq(0).all() and not weight.requires_grad and weight.dtype == dtype
    tiny = kind in ("tis", "mis", "raw", "none")  # they keep a small ratio, however small
    large = kind in ("tis", "none") or (kind == "raw" and not single)
    assert kept[:, 0].tolist() == [large, tiny, False, False, False, True, True, True]


@pytest.mark.parametrize("kind", ["mis", "tis", "seq_mask"])
def test_the_upper_bound_is_included_and_a_millionth_beyond_is_not(kind):
    bound = torch.tensor([[3.0]], dtype=torch.float64).log()
    for log_ratio, inside in ((bound, True), (bound - 1e-6, True), (bound + 1e-6, False)):
        weight, kept = TRUNCATIONS[kind](log_ratio, torch.ones(1, 1, dtype=torch.bool), 0.0, 3.0)
        assert kept.item() == (inside or kind == "tis")
        want = 3.0 if kind == "tis" and not inside else log_ratio.exp().item() * inside
        assert weight.item() == pytest.approx(want, rel=1e-12)


def test_a_sequence_is_judged_by_its_live_tokens():
    log_ratio = torch.tensor([[0.6, 9.0, 0.6], [0.8, 0.0, 0.8]])
    mask = torch.tensor([[True, False, True], [True, False, True]])
    weight, kept = TRUNCATIONS["seq_mask"](log_ratio, mask, 0.5, 2.0)  # ln 2 = .69
    assert kept.tolist() == [[True, False, True], [False] * 3]
    assert weight[0].tolist() == pytest.approx([math.exp(0.6), 0, math.exp(0.6)])
    broken = torch.tensor([[0.0, math.nan, 0.0], [0.0, math.inf, 0.0]])
    assert not TRUNCATIONS["seq_mask"](broken, torch.ones(2, 3, dtype=torch.bool), 0.5, 2.0)[
        1
    ].any()


@pytest.mark.parametrize("kind", ["mis", "tis", "seq_mask"])
def test_every_kind_refuses_an_empty_band(kind):
    with pytest.raises(ConfigError, match="high > 0"):
        TRUNCATIONS[kind](torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), 0.0, 0.0)
