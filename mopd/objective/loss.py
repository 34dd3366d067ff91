"""The objective of a micro-batch: advantages, policy loss, truncation, balance, aggregation meet.

    L = sum_i c_i w_d sum_t [ -w_t f(log pi, A_t)  +  beta kept_t D_t  +  lambda w_t k_t ]

    A_t = beta clip(sg[log T - log pi]) + alpha A_ORM    signal `sampled`; else alpha A_ORM alone
    f    policy loss (policy_losses)        w_t, kept_t  truncation of pi/mu (truncation)
    D_t  divergence from the teacher        k_t          regulariser toward a reference
    c_i  aggregation                        w_d          balance between domains
    beta = objective.teacher.weight, lambda = objective.kl.weight

With the defaults this is MOPD as printed (MATH 1, MiMo-V2-Flash eq. 5-9). D_t is a function of the
state alone, so no ratio of the sampled token belongs to it. Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mopd import objective_names as names
from mopd.objective.advantage import distillation_advantage, reward_to_go, with_orm
from mopd.objective.aggregation import SEQUENCE_WEIGHTS, Lengths
from mopd.objective.inputs import StepTotals, TokenInputs, check_inputs
from mopd.objective.policy_losses import POLICY_LOSSES, PolicyInputs
from mopd.objective.reference_kl import REFERENCE_KL
from mopd.objective.registry import lookup
from mopd.objective.stats import TokenStats
from mopd.objective.truncation import TRUNCATIONS

if TYPE_CHECKING:
    from mopd.config.objective import ObjectiveConfig


def objective_loss(
    student_logprobs_BT: Tensor,
    inputs: TokenInputs,
    config: ObjectiveConfig,
    totals: StepTotals,
) -> tuple[Tensor, TokenStats]:
    """(scalar loss share of this micro-batch, detached per-token statistics).

    student_logprobs_BT: log pi of the sampled tokens, nats; carries the gradient, as does
        `inputs.divergence_BT`. The ratios are formed in its dtype (float32 at least), all else in
        float64, which is what the loss comes in.
    totals: of the whole optimizer step. The gradients of its micro-batches and ranks are to be
        *summed*.

    A micro-batch without live tokens gives loss and gradients of exactly 0. A NaN in a live token
    makes the loss NaN: it is a fault upstream and must not pass as a dropped token.
    Raises ConfigError for unknown names and impossible parameters, ValueError for shapes, totals
    and inputs that the configuration needs and that are missing.
    """
    check_inputs(student_logprobs_BT, inputs, totals)
    batch = _Batch(student_logprobs_BT, inputs, config)
    weight_B = _sequence_weights(batch, inputs, config, totals)

    # The gradient in log pi is taken here once: it is small, and its size is a metric.
    leaf_BT = batch.student_BT.detach().requires_grad_()
    with torch.enable_grad():
        term_BT, bit_BT = _token_terms(leaf_BT, batch, config)
        value = (weight_B.unsqueeze(1) * term_BT).sum()
        (gradient_BT,) = torch.autograd.grad(value, leaf_BT)
    # Same value, same gradient in log pi; `where`, as a dropped token's log pi may be -inf.
    change = (gradient_BT * torch.where(batch.kept_BT, batch.student_BT, 0.0)).sum()
    loss = value.detach() + (change - change.detach())
    size_BT = gradient_BT.abs()
    if batch.divergence_BT is not None:
        divergence_BT = torch.where(batch.kept_BT, batch.divergence_BT, 0.0)
        divergence_BT = config.teacher.weight * weight_B.unsqueeze(1) * divergence_BT
        loss = loss + divergence_BT.sum()
        size_BT = size_BT + divergence_BT.detach().abs()
    # A tensor, not an if: asking would wait for the accelerator.
    loss = loss * torch.where(batch.broken_BT.any(), math.nan, 1.0)

    return loss, TokenStats(
        reverse_kl_BT=batch.reverse_kl_BT,
        advantage_BT=batch.advantage_BT,
        clipped_BT=batch.clipped_BT,
        kept_BT=batch.kept_BT,
        log_ratio_BT=batch.old_BT - batch.sampler_BT,
        entropy_BT=batch.clean(inputs.entropy_BT),
        gap_BT=batch.gap_BT,
        update_BT=batch.student_BT.detach() - batch.old_BT,
        policy_clipped_BT=bit_BT,
        gradient_BT=size_BT,
        reference_kl_BT=batch.reference_kl(leaf_BT.detach()),
        prompt_share_B=_prompt_share(inputs),
    )


class _Batch:
    """The inputs, with 0 at dead tokens before any arithmetic: what stands there reaches neither
    value nor gradient."""

    def __init__(
        self, student_logprobs_BT: Tensor, inputs: TokenInputs, config: ObjectiveConfig
    ) -> None:
        self.live_BT = live_BT = inputs.mask_BT
        self.inputs = inputs
        kl = config.kl.kind
        self._estimate = None if kl == "none" else lookup(REFERENCE_KL, kl, "objective.kl.kind")
        narrow_BT = torch.where(live_BT, _at_least_float32(student_logprobs_BT), 0.0)
        self.student_BT = narrow_BT.double()
        sampler_BT = self._require(inputs.sampler_logprobs_BT, "sampler_logprobs_BT")
        old_BT = self.clean(inputs.old_logprobs_BT)
        self.sampler_BT = sampler_BT
        self.old_BT = self.student_BT.detach() if old_BT is None else old_BT

        low, high = names.truncation_bounds(config.truncation)
        truncate = lookup(TRUNCATIONS, config.truncation.kind, "objective.truncation.kind")
        current = names.truncation_ratio(config) == "current"
        trainer_BT = narrow_BT.detach() if current else self.old_BT.to(narrow_BT.dtype)
        ratio_BT = trainer_BT - sampler_BT.to(narrow_BT.dtype)
        weight_BT, self.kept_BT = truncate(ratio_BT, live_BT, low, high)
        self.weight_BT = weight_BT.double()

        self.teacher_BT = self.clean(inputs.teacher_logprobs_BT)
        self.divergence_BT: Tensor | None = None
        self.clipped_BT = torch.zeros_like(live_BT)
        self.gap_BT: Tensor | None = None
        self.reverse_kl_BT: Tensor | None = None
        if self.teacher_BT is not None:
            self.reverse_kl_BT = self.student_BT.detach() - self.teacher_BT
        self.advantage_BT = self._advantage(config)
        self.broken_BT = self._broken(config)

    def clean(self, values_BT: Tensor | None) -> Tensor | None:
        """Detached float64 with 0 at dead tokens."""
        if values_BT is None:
            return None
        return torch.where(self.live_BT, values_BT.detach().double(), 0.0)

    def _require(self, values_BT: Tensor | None, name: str) -> Tensor:
        cleaned = self.clean(values_BT)
        if cleaned is None:
            raise ValueError(f"{name} is missing, and the objective reads it")
        return cleaned

    def _advantage(self, config: ObjectiveConfig) -> Tensor:
        teacher = config.teacher
        distil_BT = torch.zeros_like(self.sampler_BT)
        if teacher.weight:
            lookup(dict.fromkeys(names.SIGNALS), teacher.signal, "objective.teacher.signal")
        if teacher.weight and teacher.signal == "sampled":
            teacher_BT = self._require(self.inputs.teacher_logprobs_BT, "teacher_logprobs_BT")
            policy_BT = self.student_BT.detach() if teacher.refresh else self.old_BT
            distil_BT, self.clipped_BT = distillation_advantage(teacher_BT, policy_BT, teacher.clip)
            self.gap_BT = distil_BT.abs()
            if teacher.reward_to_go:
                distil_BT = reward_to_go(distil_BT)
        elif teacher.weight:
            divergence_BT = self.inputs.divergence_BT
            if divergence_BT is None:
                raise ValueError(f"the signal {teacher.signal!r} needs divergence_BT")
            self.divergence_BT = torch.where(self.live_BT, divergence_BT.double(), 0.0)
            self.gap_BT = self.divergence_BT.detach()
        advantage_BT = with_orm(teacher.weight * distil_BT, self.inputs.orm_advantage_B)
        return torch.where(self.live_BT, advantage_BT, 0.0)

    def _broken(self, config: ObjectiveConfig) -> Tensor:
        """Live tokens with a NaN in anything that the loss is made of: comparisons would take
        them for tokens to drop, or to keep."""
        read = [self.student_BT, self.sampler_BT, self.old_BT, self.advantage_BT]
        if self.divergence_BT is not None:
            read.append(self.divergence_BT)
        if self._estimate is not None:
            read.append(self._reference())
        topk = (self.inputs.student_topk_BTK, self.inputs.sampler_topk_BTK)
        if names.POLICY_LOSS_SPECS[config.loss.name].needs_topk:
            read += [values.sum(dim=-1) for values in topk if values is not None]
        return torch.stack([values_BT.isnan() for values_BT in read]).any(dim=0) & self.live_BT

    def _reference(self) -> Tensor:
        given_BT = self.inputs.reference_logprobs_BT
        if given_BT is None:
            given_BT = self.inputs.teacher_logprobs_BT
        return self._require(given_BT, "reference_logprobs_BT")

    def reference_kl(self, log_pi_BT: Tensor) -> Tensor | None:
        """[B, T] regulariser of each kept token, 0 elsewhere; None if there is none."""
        if self._estimate is None:
            return None
        gap_BT = log_pi_BT - self._reference()
        return self._estimate(torch.where(self.kept_BT, gap_BT, 0.0))


def _token_terms(
    log_pi_BT: Tensor, batch: _Batch, config: ObjectiveConfig
) -> tuple[Tensor, Tensor]:
    """([B, T] terms to minimise, 0 at dropped tokens; where the policy loss's own clip bit)."""
    policy_loss = lookup(POLICY_LOSSES, config.loss.name, "objective.loss.name")
    objective_BT, bit_BT = policy_loss(
        PolicyInputs(
            logprobs_BT=log_pi_BT,
            old_BT=batch.old_BT,
            sampler_BT=batch.sampler_BT,
            # A dropped token's may be infinite, and would meet its 0 weight in the backward.
            advantage_BT=torch.where(batch.kept_BT, batch.advantage_BT, 0.0),
            live_BT=batch.live_BT,
            kept_BT=batch.kept_BT,
            student_topk_BTK=batch.inputs.student_topk_BTK,
            sampler_topk_BTK=batch.inputs.sampler_topk_BTK,
        ),
        names.loss_parameters(config.loss),
    )
    term_BT = -batch.weight_BT * torch.where(batch.kept_BT, objective_BT, 0.0)
    regulariser_BT = batch.reference_kl(log_pi_BT)
    if regulariser_BT is not None:
        term_BT = term_BT + config.kl.weight * batch.weight_BT * regulariser_BT
    return term_BT, bit_BT


def _sequence_weights(
    batch: _Batch, inputs: TokenInputs, config: ObjectiveConfig, totals: StepTotals
) -> Tensor:
    """[B] float64: the aggregation's weight of each sequence times its domain's."""
    aggregate = lookup(SEQUENCE_WEIGHTS, config.aggregation, "objective.aggregation")
    counted = lookup(
        {"response": batch.live_BT, "kept": batch.kept_BT},
        config.denominator,
        "objective.denominator",
    )
    live_B = batch.live_BT.any(dim=1)

    def clean(values_B: Tensor) -> Tensor:
        return torch.where(live_B, values_B.double(), 1.0)

    group_B = inputs.group_tokens_B
    weight_B = aggregate(
        Lengths(
            tokens_B=counted.sum(dim=1).double(),
            group_tokens_B=None if group_B is None else clean(group_B),
            totals=totals,
            constant=config.constant_length,
        )
    )
    if inputs.domain_weight_B is not None:
        weight_B = weight_B * clean(inputs.domain_weight_B)
    return weight_B


def _prompt_share(inputs: TokenInputs) -> Tensor | None:
    """[B]: the row's part of its prompt group, so that the sum over a step counts its prompts."""
    if inputs.group_tokens_B is None:
        return None
    tokens_B = inputs.mask_BT.sum(dim=1).double()
    return torch.where(tokens_B > 0, tokens_B / inputs.group_tokens_B.double(), 0.0)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
