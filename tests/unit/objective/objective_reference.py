"""The objective once more, in Python floats, from the formulas of the papers: values and gradients.

Written token by token with `math` alone, with every stop-gradient done by hand: the gradient is
the formula's own, not an automatic one. Nothing of mopd is called, and no default is read from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LOSS_DEFAULTS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
}
BAND_DEFAULTS: dict[str, tuple[float, float]] = {
    "icepop": (0.5, 5.0),
    "tis": (0.0, 2.0),
    "mis": (0.0, 2.0),
    "seq_mask": (0.5, 2.0),
    "raw": (0.0, math.inf),
    "none": (0.0, math.inf),
}


@dataclass
class Case:
    """Arrays [B, T] (NumPy) and choices; what stands at dead tokens is never looked at."""

    student: np.ndarray
    sampler: np.ndarray
    mask: np.ndarray
    orm: np.ndarray
    teacher: np.ndarray | None = None
    old: np.ndarray | None = None
    reference: np.ndarray | None = None
    divergence: np.ndarray | None = None
    student_topk: np.ndarray | None = None
    sampler_topk: np.ndarray | None = None
    domain_weight: np.ndarray | None = None
    group_tokens: np.ndarray | None = None
    tokens: float = 0.0
    sequences: float = 0.0
    prompts: float = 0.0
    loss: str = "mopd"
    parameters: dict[str, float] = field(default_factory=dict)
    truncation: str = "icepop"
    low: float | None = None
    high: float | None = None
    ratio: str = "auto"
    signal: str = "sampled"
    beta: float = 1.0
    clip: float = 5.0
    reward_to_go: bool = False
    refresh: bool = True
    kl: str = "none"
    kl_weight: float = 0.0
    aggregation: str = "sequence"
    denominator: str = "response"
    constant_length: float | None = None


@dataclass
class Answer:
    loss: float
    gradient: np.ndarray
    """dL/d log pi."""
    divergence_gradient: np.ndarray
    """dL/dD."""
    kept: np.ndarray
    bit: np.ndarray
    advantage: np.ndarray
    clipped: np.ndarray


def exp(x: float) -> float:
    return math.inf if x > 709 else math.exp(x)


def reference(case: Case) -> Answer:
    shape = case.student.shape
    answer = Answer(
        0.0,
        np.zeros(shape),
        np.zeros(shape),
        np.zeros(shape, bool),
        np.zeros(shape, bool),
        np.zeros(shape),
        np.zeros(shape, bool),
    )
    for i in range(shape[0]):
        live = [t for t in range(shape[1]) if case.mask[i, t]]
        if live:
            _row(case, i, live, answer)
    return answer


def _row(case: Case, i: int, live: list[int], answer: Answer) -> None:
    pi = {t: float(case.student[i, t]) for t in live}
    mu = {t: float(case.sampler[i, t]) for t in live}
    old = pi if case.old is None else {t: float(case.old[i, t]) for t in live}

    weight = _weights(case, pi if _ratio(case) == "current" else old, mu, live)
    kept = [t for t in live if t in weight]
    advantage = _advantages(case, i, pi, old, live, answer)
    for t in live:
        answer.advantage[i, t] = advantage[t]
    for t in kept:
        answer.kept[i, t] = True

    share = _share(case, i, len(live), len(kept))
    if case.domain_weight is not None:
        share *= float(case.domain_weight[i])
    for t in kept:
        value, slopes, bit = _policy(case, i, t, pi, old, mu, advantage[t], live, kept)
        answer.bit[i, t] = bit
        answer.loss -= share * weight[t] * value
        for j, slope in slopes.items():
            answer.gradient[i, j] -= share * weight[t] * slope
        if case.divergence is not None and case.signal != "sampled":
            answer.loss += share * case.beta * float(case.divergence[i, t])
            answer.divergence_gradient[i, t] = share * case.beta
        if case.kl != "none":
            target = case.teacher if case.reference is None else case.reference
            assert target is not None
            gap = pi[t] - float(target[i, t])
            if case.kl == "k2":
                value, slope = gap * gap / 2, gap
            else:
                value, slope = exp(-gap) - 1 + gap, 1 - exp(-gap)
            answer.loss += share * case.kl_weight * weight[t] * value
            answer.gradient[i, t] += share * case.kl_weight * weight[t] * slope


def _ratio(case: Case) -> str:
    if case.ratio != "auto":
        return case.ratio
    return "current" if case.loss == "mopd" else "old"


def _weights(
    case: Case, trainer: dict[int, float], mu: dict[int, float], live: list[int]
) -> dict[int, float]:
    """token -> w; a token that is dropped is not in it."""
    low, high = BAND_DEFAULTS[case.truncation]
    low = low if case.low is None else case.low
    high = high if case.high is None else case.high
    ratio = {t: exp(trainer[t] - mu[t]) for t in live}
    match case.truncation:
        case "icepop":
            return {t: r for t, r in ratio.items() if low <= r <= high}
        case "tis":
            return {t: r if r <= high else high for t, r in ratio.items()}
        case "mis":
            return {t: r for t, r in ratio.items() if r <= high}
        case "seq_mask":
            geometric = exp(sum(trainer[t] - mu[t] for t in live) / len(live))
            return ratio if low <= geometric <= high else {}
        case "raw":
            return ratio
        case "none":
            return dict.fromkeys(live, 1.0)
    raise AssertionError(case.truncation)


def _advantages(
    case: Case, i: int, pi: dict[int, float], old: dict[int, float], live: list[int], answer: Answer
) -> dict[int, float]:
    total = {}
    own = {}
    for t in live:
        own[t] = 0.0
        if case.signal == "sampled" and case.beta:
            assert case.teacher is not None
            own[t] = float(case.teacher[i, t]) - (pi if case.refresh else old)[t]
            if case.clip and abs(own[t]) > case.clip:
                own[t] = math.copysign(case.clip, own[t])
                answer.clipped[i, t] = True
    for t in live:
        distil = sum(own[s] for s in live if s >= t) if case.reward_to_go else own[t]
        orm = float(case.orm[i] if case.orm.ndim == 1 else case.orm[i, t])
        total[t] = case.beta * distil + orm
    return total


def _share(case: Case, i: int, live: int, kept: int) -> float:
    match case.aggregation:
        case "token":
            return 1 / case.tokens
        case "sequence":
            length = live if case.denominator == "response" else kept
            return 1 / (length * case.sequences) if length else 0.0
        case "prompt":
            assert case.group_tokens is not None
            return 1 / (float(case.group_tokens[i]) * case.prompts)
        case "constant":
            assert case.constant_length is not None
            return 1 / (case.constant_length * case.sequences)
    raise AssertionError(case.aggregation)


def _policy(
    case: Case,
    i: int,
    t: int,
    pi: dict[int, float],
    old: dict[int, float],
    mu: dict[int, float],
    a: float,
    live: list[int],
    kept: list[int],
) -> tuple[float, dict[int, float], bool]:
    """(objective of token t, its slope in each log pi_j, whether the loss's own clip bit)."""
    p: dict[str, Any] = {**LOSS_DEFAULTS.get(case.loss, {}), **case.parameters}
    r = exp(pi[t] - old[t])
    match case.loss:
        case "mopd":
            return a * pi[t], {t: a}, False
        case "ppo" | "dapo":
            if a > 0 and r > 1 + p["clip_high"]:
                return (1 + p["clip_high"]) * a, {}, True
            if a < 0 and r < 1 - p["clip_low"]:
                return (1 - p["clip_low"]) * a, {}, True
            return r * a, {t: r * a}, False
        case "cispo":
            bounded = min(r, 1 + p["clip_high"])
            return bounded * a * pi[t], {t: bounded * a}, bounded < r
        case "gspo" | "gspo_token":
            s = exp(sum(pi[j] - old[j] for j in live) / len(live))
            if a > 0 and s > 1 + p["clip_high"]:
                return (1 + p["clip_high"]) * a, {}, True
            if a < 0 and s < 1 - p["clip_low"]:
                return (1 - p["clip_low"]) * a, {}, True
            if case.loss == "gspo_token":
                return s * a, {t: s * a}, False
            return s * a, {j: s * a / len(live) for j in kept}, False
        case "sapo":
            tau = p["tau_positive"] if a > 0 else p["tau_negative"]
            x = tau * (r - 1)
            gate = 1 / (1 + exp(-x)) if x > -700 else 0.0
            return 4 / tau * gate * a, {t: 4 * gate * (1 - gate) * r * a if gate else 0.0}, False
        case "dppo_tv" | "dppo_kl" | "dppo_topk":
            student, sampler = exp(pi[t]), exp(mu[t])
            far = _apart(case, i, t, student, sampler) > p["delta"]
            if far and ((a > 0 and student > sampler) or (a < 0 and student < sampler)):
                return 0.0, {}, True
            return r * a, {t: r * a}, False
        case "kimi":
            gap = pi[t] - old[t]
            return a * pi[t] - p["mu"] / 2 * gap * gap, {t: a - p["mu"] * gap}, False
    raise AssertionError(case.loss)


def _apart(case: Case, i: int, t: int, student: float, sampler: float) -> float:
    if case.loss == "dppo_tv":
        return abs(student - sampler)
    if case.loss == "dppo_kl":
        # KL(mu || pi) of {the token, anything else}
        return sampler * math.log(sampler / student) + (1 - sampler) * math.log(
            (1 - sampler) / (1 - student)
        )
    assert case.student_topk is not None and case.sampler_topk is not None
    ps = [exp(float(x)) for x in case.student_topk[i, t]]
    ms = [exp(float(x)) for x in case.sampler_topk[i, t]]
    inside = sum(abs(x - y) for x, y in zip(ps, ms, strict=True))
    return (inside + abs((1 - sum(ps)) - (1 - sum(ms)))) / 2
