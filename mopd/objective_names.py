"""Every name the objective knows, with the parameters it reads and their defaults. No torch.

Shared by the start-up checks and by `mopd.objective`, so that neither can know a name, a
parameter or a default the other does not. It stands apart from `mopd.config` because the
objective is also used where only torch is installed. `docs/objectives.md` is the same table in
words.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mopd.errors import ConfigError

if TYPE_CHECKING:
    from mopd.config.objective import ObjectiveConfig, PolicyLossConfig, TruncationConfig

DIRECTIONS = ("reverse", "forward", "jsd")
SIGNALS = ("sampled", "topk", "full")
SUPPORTS = ("teacher", "student")
AGGREGATIONS = ("token", "sequence", "prompt", "constant")
DENOMINATORS = ("response", "kept")
REFERENCE_KLS = ("none", "k2", "k3")
BALANCES = ("none", "token_share", "gap")
SCHEDULES = ("constant", "linear", "cosine")
ESTIMATORS = ("reinforce", "grpo", "rloo", "dr_grpo", "agapo", "maxrl", "kimi", "ppo_gae")
"""`ppo_gae` takes a critic's values (mopd.objective.gae), the others a group's rewards alone."""

JSD_BETA = 0.5
BASELINE_DECAY = 0.9
ALL_WRONG = 0.0
SUPPORT = "teacher"
GAE_GAMMA, GAE_LAMBDA, CRITIC_LR = 1.0, 0.95, 1e-3
GAP_EXPONENT, GAP_LOW, GAP_HIGH = 1.0, 0.05, 20.0


@dataclass(frozen=True)
class PolicyLossSpec:
    """What a policy loss reads, and what goes with it."""

    parameters: Mapping[str, float | None]
    """Name -> default; None: required, because no default has been published."""
    carries_ratio: bool
    """Whether pi/pi_old is in the loss itself. Then the truncation's ratio is pi_old/mu: with
    pi/mu the step from pi_old to pi would be weighed twice."""
    needs_topk: bool = False
    """Reads student and sampler logprobs on the sampler's top-k ids."""


POLICY_LOSS_SPECS: dict[str, PolicyLossSpec] = {
    "mopd": PolicyLossSpec({}, carries_ratio=False),
    "ppo": PolicyLossSpec({"clip_low": 0.2, "clip_high": 0.2}, carries_ratio=True),
    "dapo": PolicyLossSpec({"clip_low": 0.2, "clip_high": 0.28}, carries_ratio=True),
    "cispo": PolicyLossSpec({"clip_high": None}, carries_ratio=True),
    "gspo": PolicyLossSpec({"clip_low": 3e-4, "clip_high": 4e-4}, carries_ratio=True),
    "gspo_token": PolicyLossSpec({"clip_low": 3e-4, "clip_high": 4e-4}, carries_ratio=True),
    "sapo": PolicyLossSpec({"tau_positive": 1.0, "tau_negative": 1.05}, carries_ratio=True),
    "dppo_tv": PolicyLossSpec({"delta": None}, carries_ratio=True),
    "dppo_kl": PolicyLossSpec({"delta": None}, carries_ratio=True),
    "dppo_topk": PolicyLossSpec({"delta": None}, carries_ratio=True, needs_topk=True),
    "kimi": PolicyLossSpec({"mu": None}, carries_ratio=False),
}

PARAMETERS = ("clip_low", "clip_high", "tau_positive", "tau_negative", "delta", "mu")
"""Of all policy losses, as objective.loss spells them."""

TRUNCATION_BOUNDS: dict[str, Mapping[str, float]] = {
    "icepop": {"low": 0.5, "high": 5.0},
    "tis": {"high": 2.0},
    "mis": {"high": 2.0},
    "seq_mask": {"low": 0.5, "high": 2.0},
    "raw": {},
    "none": {},
}
"""Kind -> the bounds it reads, of the ratio of probabilities, with their defaults."""

RATIOS = ("auto", "current", "old")


def loss_parameters(config: PolicyLossConfig) -> dict[str, float]:
    """The chosen loss's parameters, defaults filled in.

    Raises ConfigError for an unknown loss, a parameter it does not read, a required one that is
    missing, and a value out of range.
    """
    key = "objective.loss"
    spec = POLICY_LOSS_SPECS.get(config.name)
    if spec is None:
        raise ConfigError(
            f"{key}.name is {config.name!r}, which is no policy loss"
            f"{_nearest(config.name, POLICY_LOSS_SPECS)}"
        )
    values = {}
    for name in PARAMETERS:
        given = getattr(config, name)
        if name not in spec.parameters:
            if given is not None:
                reads = ", ".join(spec.parameters) or "no parameters"
                raise ConfigError(
                    f"{key}.{name} is {given}, but the loss {config.name!r} does not read it "
                    f"(it reads {reads}): remove it, or choose another loss"
                )
            continue
        value = spec.parameters[name] if given is None else given
        if value is None:
            raise ConfigError(
                f"{key}.{name} is required by the loss {config.name!r}: no default has been "
                "published for it"
            )
        # A ratio cannot be below 0; a bound, a temperature or a threshold of 0 trains nothing.
        good = 0 <= value <= 1 if name == "clip_low" else value >= 0 if name == "mu" else value > 0
        if not (math.isfinite(value) and good):
            wanted = {"clip_low": "in [0, 1]", "mu": ">= 0"}.get(name, "> 0")
            raise ConfigError(f"{key}.{name} is {value}; expected a finite number {wanted}")
        values[name] = float(value)
    return values


def truncation_bounds(config: TruncationConfig) -> tuple[float, float]:
    """(low, high) of the chosen kind, defaults filled in; 0 and inf where it has no such bound.

    Raises ConfigError for an unknown kind, a bound it does not read, and an empty band.
    """
    key = "objective.truncation"
    if config.kind not in TRUNCATION_BOUNDS:
        raise ConfigError(
            f"{key}.kind is {config.kind!r}, which is no truncation"
            f"{_nearest(config.kind, TRUNCATION_BOUNDS)}"
        )
    reads = TRUNCATION_BOUNDS[config.kind]
    for name in ("low", "high"):
        given = getattr(config, name)
        if given is not None and name not in reads:
            raise ConfigError(
                f"{key}.{name} is {given}, but the kind {config.kind!r} has no such bound "
                f"(it reads {', '.join(reads) or 'none'}): remove it"
            )
    low = reads.get("low", 0.0) if config.low is None else config.low
    high = reads.get("high", math.inf) if config.high is None else config.high
    if not 0 <= low <= high or high == 0 or math.isinf(low):
        raise ConfigError(
            f"{key} has low {low} and high {high}; expected 0 <= low <= high and high > 0 "
            "(ratios of probabilities, such as 0.5 and 5.0)"
        )
    return float(low), float(high)


def truncation_ratio(objective: ObjectiveConfig) -> str:
    """'current' (pi/mu, MiMo eq. 8) or 'old' (pi_old/mu, IcePop's authors); 'auto' resolved.

    Raises ConfigError for an unknown ratio, and for pi/mu with a loss that carries pi/pi_old.
    """
    ratio, name = objective.truncation.ratio, objective.loss.name
    if ratio not in RATIOS:
        raise ConfigError(f"objective.truncation.ratio is {ratio!r}{_nearest(ratio, RATIOS)}")
    if name not in POLICY_LOSS_SPECS:
        loss_parameters(objective.loss)  # raises, naming the nearest
    # Kimi's surrogate has no ratio, yet it is derived for samples of pi_old.
    suited = "current" if name == "mopd" else "old"
    if ratio == "current" and POLICY_LOSS_SPECS[name].carries_ratio:
        raise ConfigError(
            f"objective.truncation.ratio is 'current' (pi/mu), but the loss {name!r} carries "
            "pi/pi_old itself: the step from pi_old to pi would be weighed twice. Use 'old' or "
            "'auto'."
        )
    return suited if ratio == "auto" else ratio


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(known)}"
