"""Divergence from a teacher of whom K logprobs a row are known, the rest folded into one bucket.

With P the student's and Q the teacher's distribution over the K listed ids and the tail:

    reverse   KL(P || Q) = sum P (log P - log Q)         the default of on-policy distillation
    forward   KL(Q || P)
    jsd       beta KL(Q || M) + (1 - beta) KL(P || M),   M = beta Q + (1 - beta) P

(the generalised JSD of arXiv 2306.13649, teacher first). Each is a lower bound of the divergence
over the whole vocabulary, is 0 only where the two agree on all K + 1, and has its optimum at
P = Q. A sum over the K alone would not: its optimum is at P = Q / e.

Shapes: N rows, V columns of this rank's vocabulary shard, K listed ids a row, B = K + 1 buckets.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.errors import DataError
from mopd.kernels.buckets import BucketLogprobs, bucket_logprobs
from mopd.kernels.checks import check_direction

TAIL_FLOOR = 1e-7
"""Least probability given to the teacher's tail: what 1 - sum loses of float32 logprobs anyway.
Keeps the reverse KL finite where the teacher's K add up to 1 and the student's do not."""

EXCESS = 1e-3
"""How far above 1 a teacher's listed probabilities may add up (bfloat16 logits, renormalised top-k
answers) before it is not a distribution."""


def topk_divergence(
    logits_NV: Tensor,
    ids_NK: Tensor,
    teacher_logprobs_NK: Tensor,
    *,
    direction: str = "reverse",
    beta: float | None = None,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
) -> Tensor:
    """[N] divergences in nats, differentiable in `logits_NV`; rows without a used slot are exactly
    0 and get no gradient.

    ids_NK: [N, K] int64; -1 marks an unused slot, an id listed twice counts once (its first slot):
        a teacher's top k and the sampled token can be given side by side.
    teacher_logprobs_NK: [N, K] the teacher's logprobs of those ids; anything in unused slots.
    direction, beta: "reverse", "forward", or "jsd" with 0 < beta < 1.
    The other arguments and errors are those of `buckets.bucket_logprobs`. On CPU a teacher logprob
    that is not finite or is above 0, or a row adding up to more than 1, raises DataError; on an
    accelerator, where looking would stall the stream, the caller has to have looked.
    """
    check_direction(direction, beta)
    buckets = bucket_logprobs(
        logits_NV,
        ids_NK,
        temperature=temperature,
        valid_vocab=valid_vocab,
        vocab_start=vocab_start,
        group=group,
        backend=backend,
        inplace_backward=inplace_backward,
    )
    return bucket_divergence(buckets, teacher_logprobs_NK, direction=direction, beta=beta)


def bucket_divergence(
    buckets: BucketLogprobs,
    teacher_logprobs_NK: Tensor,
    *,
    direction: str = "reverse",
    beta: float | None = None,
) -> Tensor:
    """`topk_divergence` of buckets that are there already (a trainer reads the sampled token's
    logprob and the entropy from the same ones)."""
    check_direction(direction, beta)
    if teacher_logprobs_NK.shape != buckets.listed_NK.shape:
        raise ValueError(
            f"got teacher logprobs {tuple(teacher_logprobs_NK.shape)} for ids "
            f"{tuple(buckets.listed_NK.shape)}; expected the same [N, K]"
        )
    counted_NK, infinity = buckets.counted_NK, float("inf")
    check_teacher_topk(teacher_logprobs_NK, counted_NK)
    logp_NB = torch.cat(
        [buckets.listed_NK.masked_fill(~counted_NK, -infinity), buckets.tail_N.unsqueeze(1)], dim=1
    )
    logq_NB = _teacher_buckets(teacher_logprobs_NK, counted_NK, buckets.tail_N.detach())
    live_N = counted_NK.any(dim=1)
    return torch.where(live_N, divergence(logp_NB, logq_NB.to(logp_NB), direction, beta), 0.0)


def check_teacher_topk(teacher_logprobs_NK: Tensor, counted_NK: Tensor) -> None:
    """DataError (for tensors on the CPU) unless every row's counted slots are of a distribution."""
    if teacher_logprobs_NK.device.type != "cpu":
        return
    wide_NK = torch.where(counted_NK, teacher_logprobs_NK.double(), float("-inf"))
    bad_NK = counted_NK & ~(wide_NK.isfinite() & (wide_NK <= EXCESS))
    mass_N = wide_NK.exp().sum(dim=1)
    if bool(bad_NK.any()):
        row, slot = (int(i) for i in bad_NK.nonzero()[0])
        raise DataError(
            f"the teacher's logprob in row {row}, slot {slot} is {float(wide_NK[row, slot])} "
            f"({int(bad_NK.sum())} such); expected a finite number, at most 0. Mask the sample, or "
            "mark the slot unused (id -1)."
        )
    if bool((mass_N > 1 + EXCESS).any()):
        row = int(mass_N.argmax())
        raise DataError(
            f"the teacher's {int(counted_NK[row].sum())} probabilities of row {row} add up to "
            f"{float(mass_N[row]):.4f}; expected at most 1. These are not logprobs of one "
            "distribution: check the server's logprobs mode, and that ids and logprobs belong "
            "to each other."
        )


def _teacher_buckets(teacher_NK: Tensor, counted_NK: Tensor, student_tail_N: Tensor) -> Tensor:
    """[N, B] the teacher's log probabilities, float64, without gradient; -inf in unused slots."""
    infinity = float("inf")
    listed_NK = teacher_NK.detach().double().masked_fill(~counted_NK, -infinity)
    tail_N = (1.0 - listed_NK.exp().sum(dim=1)).clamp(min=TAIL_FLOOR).log()
    # The whole vocabulary is listed: there is no tail to give the floor to
    tail_N = tail_N.masked_fill(student_tail_N == -infinity, -infinity)
    logq_NB = torch.cat([listed_NK, tail_N.unsqueeze(1)], dim=1)
    # Rounding and the floor make the sum 1 + 1e-7: with a true distribution the KL is never below 0
    return logq_NB - logq_NB.logsumexp(dim=1, keepdim=True)


def divergence(logp_NB: Tensor, logq_NB: Tensor, direction: str, beta: float | None) -> Tensor:
    """[N] divergence of distributions given as log probabilities; differentiable in both.

    A bucket of probability 0 on the weighting side adds exactly 0, in value and gradient.
    """

    def weighted(log_weight: Tensor, log_other: Tensor) -> Tensor:
        live = log_weight > -math.inf  # where before arithmetic: -inf - -inf would reach a gradient
        log_weight = torch.where(live, log_weight, 0.0)
        log_other = torch.where(live, log_other, 0.0)
        return torch.where(live, log_weight.exp() * (log_weight - log_other), 0.0).sum(dim=1)

    if direction == "reverse":
        return weighted(logp_NB, logq_NB)
    if direction == "forward":
        return weighted(logq_NB, logp_NB)
    assert direction == "jsd" and beta is not None
    some_NB = (logp_NB > -math.inf) | (logq_NB > -math.inf)
    mixed_NB = torch.logaddexp(
        torch.where(some_NB, logq_NB, 0.0) + math.log(beta),
        torch.where(some_NB, logp_NB, 0.0) + math.log1p(-beta),
    )
    return beta * weighted(logq_NB, mixed_NB) + (1 - beta) * weighted(logp_NB, mixed_NB)
