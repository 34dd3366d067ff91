"""Correction for tokens sampled by the rollout engine (mu) and trained on by another (pi)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mopd.errors import ConfigError


def icepop(log_ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(weight, kept): pi/mu where low <= pi/mu <= high, both bounds included, else exactly 0.

    MATH 1 (MiMo-V2-Flash eq. 8, after IcePop): w = sg[pi/mu] inside the band, else 0.

    log_ratio: log pi - log mu, any shape, nats; +-inf and NaN are outside the band. Compared as a
        logarithm in its own dtype, so exp never overflows and a bound's own logarithm is inside.
    low, high: 0 <= low <= high, of the ratio; low = 0 and high = inf leave a side open.
    Returns a detached weight of log_ratio's dtype and a bool mask of its shape.
    """
    if not 0 <= low <= high or high == 0 or math.isinf(low):
        raise ConfigError(
            f"objective.icepop_low is {low} and icepop_high {high}; expected 0 <= low <= high, "
            "high > 0 (ratios of probabilities, such as 0.5 and 5.0)."
        )
    log_ratio = log_ratio.detach()
    log_low = math.log(low) if low > 0 else -math.inf
    log_high = math.log(high)
    # A ratio of exactly 0 or inf (log -+inf) is no weight even where that side is open.
    kept = (log_ratio >= log_low) & (log_ratio <= log_high) & log_ratio.isfinite()
    # where before exp: a dropped token gives exactly 0, never 0 * inf
    weight = torch.where(kept, torch.where(kept, log_ratio, 0.0).exp(), 0.0)
    return weight, kept


TRUNCATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"icepop": icepop}
"""name -> f(log_ratio, **parameters) -> (weight, kept)."""
