"""The slow, plain definition of a gathered logprob: what every backend is compared with.

    logprob_n = log_softmax(logits_n / T)[target_n]    (natural log)

Shapes: N rows (tokens), V vocabulary columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -1
"""Target id of a row without a token: its logprob and its gradient are exactly 0."""


def gathered_logprobs_reference(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> Tensor:
    """[N] logprobs of `target_ids_N` (int64), differentiable in `logits_NV` any number of times.

    The softmax runs over the first `valid_vocab` columns only (the rest are the padded rows of an
    LM head). Computed and returned in float32, or in float64 for float64 logits. Raises torch's
    IndexError for an id outside the valid columns that is not IGNORE.
    """
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    out_N = wide_NV.new_zeros(target_ids_N.shape)
    live_N = target_ids_N != IGNORE  # selecting rows keeps NaN in ignored rows out of the graph
    scaled = wide_NV[live_N][:, :valid_vocab] / temperature
    log_softmax = torch.log_softmax(scaled, dim=-1)
    picked = log_softmax.gather(1, target_ids_N[live_N].unsqueeze(1)).squeeze(1)
    return out_N.masked_scatter(live_N, picked)


def divergence_reference(
    student_NB: Tensor, teacher_NB: Tensor, *, direction: str = "reverse", beta: float = 0.5
) -> Tensor:
    """[N] divergence of two log probabilities [N, B], from the definition; 0 log 0 = 0.

    reverse KL(P || Q), forward KL(Q || P), jsd beta KL(Q || M) + (1 - beta) KL(P || M) with
    M = beta Q + (1 - beta) P; P the student's, Q the teacher's.
    """
    p, q = student_NB.exp(), teacher_NB.exp()
    xlogy = torch.special.xlogy
    if direction == "reverse":
        return (xlogy(p, p) - torch.where(p > 0, p * teacher_NB, 0.0)).sum(1)
    if direction == "forward":
        return (xlogy(q, q) - torch.where(q > 0, q * student_NB, 0.0)).sum(1)
    mixed = beta * q + (1 - beta) * p
    kl_teacher = (xlogy(q, q) - xlogy(q, mixed)).sum(1)
    kl_student = (xlogy(p, p) - xlogy(p, mixed)).sum(1)
    return beta * kl_teacher + (1 - beta) * kl_student


def full_divergence_reference(
    logits_NV: Tensor,
    teacher_logits_NV: Tensor,
    *,
    direction: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> Tensor:
    """[N] divergence over the first `valid_vocab` columns, differentiable any number of times."""
    return divergence_reference(
        torch.log_softmax(logits_NV[:, :valid_vocab] / temperature, dim=1),
        torch.log_softmax(teacher_logits_NV[:, :valid_vocab] / teacher_temperature, dim=1),
        direction=direction,
        beta=beta,
    )


def topk_divergence_reference(
    logits_NV: Tensor,
    ids_NK: Tensor,
    teacher_logprobs_NK: Tensor,
    *,
    direction: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> Tensor:
    """[N] divergence of the listed ids and one tail bucket; row by row, for small inputs.

    Ids of -1 are unused, repeats count once. The tails are sums over (student) or the complement
    of (teacher) the listed ids.
    """
    rows = []
    for logits_V, ids_K, teacher_K in zip(logits_NV, ids_NK, teacher_logprobs_NK, strict=True):
        slots = {int(token): slot for slot, token in reversed(list(enumerate(ids_K)))}
        slots.pop(-1, None)
        if not slots:
            rows.append(logits_NV.new_zeros(()))
            continue
        logp_V = torch.log_softmax(logits_V[:valid_vocab] / temperature, dim=0)
        listed = torch.tensor(list(slots), device=logits_V.device)
        rest_V = torch.ones_like(logp_V, dtype=torch.bool)
        rest_V[listed] = False
        student = [logp_V[listed]]
        teacher = [teacher_K[list(slots.values())].to(logp_V)]
        if bool(rest_V.any()):
            student.append(logp_V[rest_V].logsumexp(0, keepdim=True))
            teacher.append(torch.log1p(-teacher[0].exp().sum().clamp(max=1)).unsqueeze(0))
        rows.append(
            divergence_reference(
                torch.cat(student)[None], torch.cat(teacher)[None], direction=direction, beta=beta
            )[0]
        )
    return torch.stack(rows) if rows else logits_NV.new_zeros(0)
