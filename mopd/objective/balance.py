"""Weights of the domains in the loss (MATH 7; Open-MOPD, arXiv 2608.19098).

Under a token mean a domain with short answers starves: its share of the gradient is its share of
the tokens. The weights w_d multiply the terms of a domain's samples. They are rescaled so that
their mean over the aggregation's own units is 1 (tokens under `token` and `constant`, sequences
under `sequence`, prompts under `prompt`), which keeps the loss's scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mopd.errors import ConfigError
from mopd.objective_names import GAP_EXPONENT, GAP_HIGH, GAP_LOW

if TYPE_CHECKING:
    from mopd.config.objective import BalanceConfig


@dataclass(frozen=True)
class DomainShare:
    """What one domain brings to the step, over all ranks; live samples only."""

    tokens: float
    sequences: float
    prompts: float
    gap: float = 0.0
    """m_d: mean |clip(log T - log pi)| per token, nats."""


_UNIT = {"token": "tokens", "constant": "tokens", "sequence": "sequences", "prompt": "prompts"}


def domain_weights(
    config: BalanceConfig, aggregation: str, shares: Mapping[str, DomainShare]
) -> dict[str, float]:
    """domain -> w_d for the domains of `shares`; those without a unit are left out.

    token_share  w_d = g_d / s_d: the target share over the domain's share of the units. Targets
                 are relative, so that an absent domain changes nothing; none given: equal.
    gap          w_d = clamp((m_d / m_ref)^a, low, high), m_ref the mean over the units, so that a
                 domain that lags gets more; with targets, times token_share's weight. Under a
                 token mean the gap alone does not know of lengths: a starved domain is fed once it
                 lags.

    The inverse direction, a < 0, gives most to the domain nearest its teacher and diverges: it is
    refused with a ConfigError, as are an unknown kind, a bad band and missing targets.
    """
    if config.kind not in ("none", "token_share", "gap"):
        raise ConfigError(
            f"objective.balance.kind is {config.kind!r}; expected none, token_share or gap"
        )
    if aggregation not in _UNIT:
        raise ConfigError(
            f"objective.aggregation is {aggregation!r}; expected one of {', '.join(_UNIT)}"
        )
    units = {name: float(getattr(s, _UNIT[aggregation])) for name, s in shares.items()}
    units = {name: count for name, count in units.items() if count > 0}
    if not units or config.kind == "none":
        return dict.fromkeys(units, 1.0)
    share = {name: count / sum(units.values()) for name, count in units.items()}
    weights = dict.fromkeys(units, 1.0)
    if config.kind == "token_share" or config.targets:
        targets = _targets(config, list(units))
        weights = {name: targets[name] / share[name] for name in units}
    if config.kind == "gap":
        factor = _gap_factors(config, share, {name: shares[name].gap for name in units})
        weights = {name: weight * factor[name] for name, weight in weights.items()}
    mean = sum(share[name] * weight for name, weight in weights.items())
    return {name: weight / mean for name, weight in weights.items()}


def _targets(config: BalanceConfig, present: list[str]) -> dict[str, float]:
    """g_d up to a common factor, which the last rescaling takes out."""
    if not config.targets:
        return dict.fromkeys(present, 1.0)
    missing = sorted(name for name in present if not config.targets.get(name, 0.0) > 0)
    if missing:
        raise ConfigError(
            f"objective.balance.targets gives {', '.join(missing)} no target above 0; expected one "
            "for every domain, or no targets (equal)"
        )
    return {name: float(config.targets[name]) for name in present}


def _gap_factors(
    config: BalanceConfig, share: Mapping[str, float], gap: Mapping[str, float]
) -> dict[str, float]:
    exponent = GAP_EXPONENT if config.exponent is None else config.exponent
    low = GAP_LOW if config.low is None else config.low
    high = GAP_HIGH if config.high is None else config.high
    if not exponent >= 0:
        raise ConfigError(
            f"objective.balance.exponent is {exponent}; expected >= 0: a negative one feeds the "
            "domain that needs it least, which diverges (arXiv 2608.19098)"
        )
    if not 0 < low <= high:
        raise ConfigError(
            f"objective.balance has low {low} and high {high}; expected 0 < low <= high"
        )
    reference = sum(share[name] * value for name, value in gap.items())
    if reference == 0:
        return dict.fromkeys(gap, 1.0)
    return {
        name: min(max((value / reference) ** exponent, low), high) for name, value in gap.items()
    }
