"""Divergences of whole distributions: the plain definition that the kernels are held to (MATH 3).

P is the student's, Q the teacher's distribution at one position:
    reverse   KL(P || Q)        the default of on-policy distillation: seeks a mode
    forward   KL(Q || P)        covers all modes
    jsd       beta KL(Q || M) + (1 - beta) KL(P || M),  M = beta Q + (1 - beta) P
              (arXiv 2306.13649); over beta -> 0 it is beta times the forward, over beta -> 1
              (1 - beta) times the reverse KL.
`topk` folds all ids outside a support into one bucket: a lower bound of the full divergence, whose
optimum is P = Q on the support and on the rest's sum. A sum over the support alone is no KL: its
optimum is P = Q/e (CASES C09); renormalised, it leaves the mass on the support free. Neither is
offered. Shapes: [..., V] logits, [..., K] ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mopd.errors import ConfigError


def full_divergence(
    student_logits: Tensor, teacher_logits: Tensor, direction: str, beta: float | None = None
) -> Tensor:
    """[...] nats, float64, differentiable in both arguments."""
    return _divergence(
        student_logits.double().log_softmax(-1),
        teacher_logits.double().log_softmax(-1),
        direction,
        beta,
    )


def topk_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    ids: Tensor,
    direction: str,
    beta: float | None = None,
) -> Tensor:
    """[...] nats over the distinct `ids` [..., K] (int64) and one bucket for all the others."""
    return _divergence(
        _buckets(student_logits.double(), ids),
        _buckets(teacher_logits.double(), ids),
        direction,
        beta,
    )


def _buckets(logits: Tensor, ids: Tensor) -> Tensor:
    """[..., K + 1] log probabilities: of the ids, then of all the others together."""
    logprobs = logits.log_softmax(-1)
    outside = torch.ones_like(logits, dtype=torch.bool).scatter(-1, ids, False)
    # A sum of its own rather than 1 minus the rest: it keeps its digits when it is small.
    rest = torch.where(outside, logprobs, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids), rest], dim=-1)


def _divergence(log_p: Tensor, log_q: Tensor, direction: str, beta: float | None) -> Tensor:
    if direction == "reverse":
        return _kl(log_p, log_q)
    if direction == "forward":
        return _kl(log_q, log_p)
    if direction != "jsd":
        raise ConfigError(f"direction is {direction!r}; expected reverse, forward or jsd")
    if beta is None or not 0 < beta < 1:
        raise ConfigError(f"jsd_beta is {beta}; expected a number above 0 and below 1")
    mixture = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    return beta * _kl(log_q, mixture) + (1 - beta) * _kl(log_p, mixture)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum p (log p - log q); a bucket with p = 0 gives 0, in value and gradient."""
    there = log_p > -torch.inf
    log_p, log_q = torch.where(there, log_p, 0.0), torch.where(there, log_q, 0.0)
    return torch.where(there, log_p.exp() * (log_p - log_q), 0.0).sum(-1)
