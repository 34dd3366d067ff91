"""Policy losses: what each token's log pi and advantage make of an update (MATH 5).

A loss is a function (PolicyInputs, parameters) -> (objective_BT, bit_BT):
    objective_BT: float64, to be *maximised*, differentiable in `logprobs_BT` of kept tokens alone;
        what it holds at other tokens is not read.
    bit_BT: bool, kept tokens where the loss's own clip or mask cut the gradient.
The truncation's weight, the mask and the aggregation come on top (mopd.objective.loss).

r_t = pi_t / pi_old_t, whose gradient at pi = pi_old is that of log pi. Names, parameters and
defaults: mopd.config.objective_names. Shapes: B sequences, T tokens, K ids of a top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyInputs:
    """Float64 logprobs of the sampled tokens in nats, with 0 at dead tokens."""

    logprobs_BT: Tensor
    """log pi, with gradient; not to be read at tokens that are not kept (use `where`)."""
    old_BT: Tensor
    """log pi_old, detached."""
    sampler_BT: Tensor
    """log mu, detached."""
    advantage_BT: Tensor
    """A, detached; 0 at tokens that are not kept."""
    live_BT: Tensor
    kept_BT: Tensor
    """Live tokens that the truncation keeps: the only ones to get a gradient."""
    student_topk_BTK: Tensor | None = None
    sampler_topk_BTK: Tensor | None = None


Parameters = Mapping[str, float]
PolicyLoss = Callable[[PolicyInputs, Parameters], tuple[Tensor, Tensor]]


def mopd(inputs: PolicyInputs, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """A log pi (MiMo-V2-Flash eq. 8; the w of that equation is the truncation's)."""
    return inputs.advantage_BT * _kept(inputs, inputs.logprobs_BT), _never(inputs)


def ppo(inputs: PolicyInputs, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A), PPO (arXiv 1707.06347); unequal bounds: DAPO."""
    return _clipped(_log_ratio(inputs).exp(), inputs, parameters)


def cispo(inputs: PolicyInputs, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """sg[min(r, 1 + high)] A log pi, MiniMax-M1 (arXiv 2506.13585); no lower bound.

    Every token keeps a gradient; only its weight is bounded.
    """
    ratio_BT = _log_ratio(inputs).detach().exp()
    bound = 1 + parameters["clip_high"]
    weight_BT = ratio_BT.clamp(max=bound)
    objective_BT = weight_BT * inputs.advantage_BT * _kept(inputs, inputs.logprobs_BT)
    return objective_BT, (ratio_BT > bound) & inputs.kept_BT


def gspo(inputs: PolicyInputs, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """min(s A, clip(s) A) with the sequence's s = (pi(y) / pi_old(y))^(1/|y|), GSPO
    (arXiv 2507.18071 eq. 5, 7).

    Through s the advantage of each token moves every token of its sequence: for advantages that
    differ by token (a teacher's) `gspo_token` keeps them apart.
    """
    return _clipped(_sequence_log_ratio(inputs).exp(), inputs, parameters)


def gspo_token(inputs: PolicyInputs, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """min(s_t A, clip(s_t) A) with s_t = sg[s] pi / sg[pi], GSPO-token (arXiv 2507.18071 eq. 13).

    The same values as gspo; the gradient of a token is its own.
    """
    sequence_BT = _sequence_log_ratio(inputs).detach()
    own_BT = _kept(inputs, inputs.logprobs_BT)
    return _clipped((sequence_BT + own_BT - own_BT.detach()).exp(), inputs, parameters)


def sapo(inputs: PolicyInputs, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """(4/tau) sigmoid(tau (r - 1)) A, tau by the sign of A, SAPO (arXiv 2511.20347).

    A soft clip: the gradient's weight is 1 at r = 1 and fades to both sides, never 0.
    """
    ratio_BT = _log_ratio(inputs).exp()
    # full_like first: where of two plain numbers would be float32
    tau_BT = torch.full_like(ratio_BT, parameters["tau_negative"])
    tau_BT = torch.where(inputs.advantage_BT > 0, parameters["tau_positive"], tau_BT)
    gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1))
    return gate_BT * inputs.advantage_BT, _never(inputs)


def dppo_tv(inputs: PolicyInputs, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """r A, masked where A > 0 and pi - mu > delta, or A < 0 and mu - pi > delta.

    DPPO with binary total variation (arXiv 2602.04879): a trust region of probabilities, which
    leaves rare tokens free where a ratio would clip them. Anchored to mu, what really sampled.
    """
    pi_BT, mu_BT = _probabilities(inputs)
    return _masked(inputs, (pi_BT - mu_BT).abs() > parameters["delta"])


def dppo_kl(inputs: PolicyInputs, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """As dppo_tv, by the binary KL(mu || pi) of the sampled token against the rest > delta."""
    pi_BT, mu_BT = _probabilities(inputs)
    # The student may give 1 exactly in float32; the rest then is the smallest there is.
    rest_pi_BT, rest_mu_BT = (1 - pi_BT).clamp(min=_TINY), (1 - mu_BT).clamp(min=_TINY)
    log_gap_BT = inputs.sampler_BT - inputs.logprobs_BT.detach()
    same_BT = mu_BT * log_gap_BT + rest_mu_BT * (rest_mu_BT.log() - rest_pi_BT.log())
    return _masked(inputs, same_BT > parameters["delta"])


def dppo_topk(inputs: PolicyInputs, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """As dppo_tv, by total variation on the sampler's top-k ids and one bucket for the rest."""
    if inputs.student_topk_BTK is None or inputs.sampler_topk_BTK is None:
        raise ValueError("dppo_topk needs student_topk_BTK and sampler_topk_BTK; they are missing")
    # what stands at dead tokens comes to nothing: they are not kept, and no gradient flows here
    pi_BTK = inputs.student_topk_BTK.detach().double().exp()
    mu_BTK = inputs.sampler_topk_BTK.detach().double().exp()
    # the rest's difference is that of the two sums
    rest_BT = (pi_BTK.sum(-1) - mu_BTK.sum(-1)).abs()
    distance_BT = ((pi_BTK - mu_BTK).abs().sum(-1) + rest_BT) / 2
    return _masked(inputs, distance_BT > parameters["delta"])


def kimi(inputs: PolicyInputs, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """A log pi - (mu/2) (log pi/pi_old)^2, Kimi K1.5 (arXiv 2501.12599 eq. 3), token by token.

    The paper squares the log-ratio of the whole sequence; a token's keeps the terms additive.
    """
    log_pi_BT = _kept(inputs, inputs.logprobs_BT)
    square_BT = _log_ratio(inputs).square()
    return inputs.advantage_BT * log_pi_BT - parameters["mu"] / 2 * square_BT, _never(inputs)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "mopd": mopd,
    "ppo": ppo,
    "dapo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dppo_topk": dppo_topk,
    "kimi": kimi,
}

_TINY = 1e-12


def _kept(inputs: PolicyInputs, values_BT: Tensor) -> Tensor:
    return torch.where(inputs.kept_BT, values_BT, 0.0)


def _never(inputs: PolicyInputs) -> Tensor:
    return torch.zeros_like(inputs.kept_BT)


def _log_ratio(inputs: PolicyInputs) -> Tensor:
    """log pi/pi_old, 0 at tokens that are not kept."""
    return _kept(inputs, inputs.logprobs_BT - inputs.old_BT)


def _sequence_log_ratio(inputs: PolicyInputs) -> Tensor:
    """[B, T]: the mean over the sequence's live tokens of log pi/pi_old.

    Tokens that are not kept count in it, and get no gradient from it (C24).
    """
    gap_BT = inputs.logprobs_BT.detach() - inputs.old_BT
    outside_BT = torch.where(inputs.live_BT & gap_BT.isfinite(), gap_BT, 0.0)
    gap_BT = torch.where(inputs.kept_BT, inputs.logprobs_BT - inputs.old_BT, outside_BT)
    mean_B = gap_BT.sum(dim=1) / inputs.live_BT.sum(dim=1).clamp(min=1)
    return mean_B.unsqueeze(1).expand_as(gap_BT)


def _clipped(
    ratio_BT: Tensor, inputs: PolicyInputs, parameters: Parameters
) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r) A), the pessimistic one: no reward for leaving the band further."""
    free_BT = ratio_BT * inputs.advantage_BT
    bounded_BT = ratio_BT.clamp(1 - parameters["clip_low"], 1 + parameters["clip_high"])
    bounded_BT = bounded_BT * inputs.advantage_BT
    bit_BT = (bounded_BT < free_BT) & inputs.kept_BT
    return torch.where(bit_BT, bounded_BT, free_BT), bit_BT


def _probabilities(inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
    return inputs.logprobs_BT.detach().exp(), inputs.sampler_BT.exp()


def _masked(inputs: PolicyInputs, far_BT: Tensor) -> tuple[Tensor, Tensor]:
    """r A, 0 where the policies are far apart and the update would part them further."""
    apart_BT = inputs.logprobs_BT.detach() - inputs.sampler_BT
    away_BT = ((inputs.advantage_BT > 0) & (apart_BT > 0)) | (
        (inputs.advantage_BT < 0) & (apart_BT < 0)
    )
    bit_BT = far_BT & away_BT & inputs.kept_BT
    objective_BT = _log_ratio(inputs).exp() * inputs.advantage_BT
    return torch.where(bit_BT, 0.0, objective_BT), bit_BT
