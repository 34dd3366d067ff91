"""Correction for tokens sampled by the rollout engine (mu) and trained on by another (pi).

    w_t = sg[pi_t / mu_t], cut as the kind says     (MATH 1, 2; pi is pi_old where so chosen)

A kind is a function (log_ratio_BT, mask_BT, low, high) -> (weight_BT, kept_BT):
    log_ratio_BT: log pi - log mu, nats; anything at dead tokens. No gradient flows through it.
    weight_BT: detached, log_ratio's dtype, exactly 0 where not kept. kept_BT: bool, within mask.
Ratios are compared as logarithms in their own dtype, so that exp never overflows and a bound's
own logarithm is inside. In every kind a ratio of 0, inf or NaN is no weight: the token is dropped.
Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mopd.errors import ConfigError

Truncation = Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def icepop(log_ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(weight, kept): pi/mu where low <= pi/mu <= high, both bounds included, else exactly 0.

    MATH 1 (MiMo-V2-Flash eq. 8, after IcePop): w = sg[pi/mu] inside the band, else 0.

    log_ratio: any shape. low, high: 0 <= low <= high, of the ratio; low = 0 and high = inf leave
        a side open. Raises ConfigError for an empty band.
    """
    log_ratio = log_ratio.detach()
    log_low, log_high = _log_bounds(low, high)
    kept = (log_ratio >= log_low) & (log_ratio <= log_high)
    return _ratio(log_ratio, kept)


def _icepop(log_ratio_BT: Tensor, mask_BT: Tensor, low: float, high: float) -> _Pair:
    return icepop(torch.where(mask_BT, log_ratio_BT, math.nan), low, high)


def tis(log_ratio_BT: Tensor, mask_BT: Tensor, low: float, high: float) -> _Pair:
    """min(pi/mu, high): clamped above, nothing dropped. Truncated importance sampling."""
    _, log_high = _log_bounds(0.0, high)
    log_ratio_BT = log_ratio_BT.detach()
    return _ratio(log_ratio_BT.clamp(max=log_high), mask_BT & log_ratio_BT.isfinite())


def mis(log_ratio_BT: Tensor, mask_BT: Tensor, low: float, high: float) -> _Pair:
    """pi/mu, zero above `high` only. Masked importance sampling."""
    return _icepop(log_ratio_BT, mask_BT, 0.0, high)


def seq_mask(log_ratio_BT: Tensor, mask_BT: Tensor, low: float, high: float) -> _Pair:
    """pi/mu of every token of a sequence whose exp(mean log pi/mu) is in [low, high], else 0.

    The mean runs over the live tokens. The ratio is bounded on average, not token by token.
    A sequence with a token whose log-ratio is not finite is dropped whole.
    """
    log_low, log_high = _log_bounds(low, high)
    clean_BT = torch.where(mask_BT, log_ratio_BT.detach(), 0.0)
    mean_B = clean_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)
    kept_B = (mean_B >= log_low) & (mean_B <= log_high) & mean_B.isfinite()
    return _ratio(clean_BT, mask_BT & kept_B.unsqueeze(1))


def raw(log_ratio_BT: Tensor, mask_BT: Tensor, low: float, high: float) -> _Pair:
    """pi/mu as it is: unbiased, and of unbounded variance."""
    return _ratio(log_ratio_BT.detach(), mask_BT)


def none(log_ratio_BT: Tensor, mask_BT: Tensor, low: float, high: float) -> _Pair:
    """1: the two engines are taken for one. Biased as far as they are not (MATH 11.3)."""
    kept_BT = mask_BT & log_ratio_BT.detach().isfinite()
    return kept_BT.to(log_ratio_BT.dtype), kept_BT


TRUNCATIONS: dict[str, Truncation] = {
    "icepop": _icepop,
    "tis": tis,
    "mis": mis,
    "seq_mask": seq_mask,
    "raw": raw,
    "none": none,
}

_Pair = tuple[Tensor, Tensor]


def _ratio(log_ratio: Tensor, kept: Tensor) -> _Pair:
    """exp(log_ratio) where kept and a number, else exactly 0."""
    weight = log_ratio.exp()
    kept = kept & log_ratio.isfinite() & weight.isfinite()
    # where, not a product: a dropped token gives exactly 0, never 0 * inf
    return torch.where(kept, weight, 0.0), kept


def _log_bounds(low: float, high: float) -> tuple[float, float]:
    if not 0 <= low <= high or high == 0 or math.isinf(low):
        raise ConfigError(
            f"objective.truncation has low {low} and high {high}; expected 0 <= low <= high and "
            "high > 0 (ratios of probabilities, such as 0.5 and 5.0)."
        )
    return math.log(low) if low > 0 else -math.inf, math.log(high)
