"""The torch backend of whole-vocabulary divergences, in chunks of live rows.

Shapes: N rows, V columns of this shard (the student's and the teacher's logits may have padding of
different widths beyond the valid ones), n rows of a chunk. x: student's logits, y: teacher's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mopd.kernels.chunks import Rows, live_chunks
from mopd.kernels.pair_partials import PairPartials, PairStats, PairSums
from mopd.kernels.partials import Columns, RowStats
from mopd.kernels.torch_rows import accumulator_dtype, zero_dead_rows


def pair_partials(
    a_NV: Tensor,
    b_NV: Tensor,
    live_N: Tensor,
    *,
    a_temperature: float,
    b_temperature: float,
    columns: Columns,
    weighted: bool,
) -> PairPartials:
    """Maxima and sums of both, and with `weighted` the sum that gives KL(A || B)."""
    dtype = _dtype(a_NV, b_NV)
    parts = PairPartials.nothing(live_N, dtype)
    if columns.valid == 0:
        return parts
    for part in live_chunks(live_N, columns.valid):
        shifted = []
        for logits_NV, temperature, max_N, sum_N in (
            (a_NV, a_temperature, parts.a_max_N, parts.a_sum_N),
            (b_NV, b_temperature, parts.b_max_N, parts.b_sum_N),
        ):
            logits_nV = logits_NV[part, : columns.valid]
            max_n1 = logits_nV.amax(dim=1, keepdim=True).to(dtype)
            max_N[part] = max_n1.squeeze(1)
            scaled_nV = (logits_nV - max_n1.masked_fill(max_n1 == float("-inf"), 0.0)).div_(
                temperature
            )
            exps_nV = scaled_nV.exp()
            sum_N[part] = exps_nV.sum(dim=1)
            shifted.append((scaled_nV, exps_nV))
        if weighted:
            (a_nV, a_exps_nV), (b_nV, _) = shifted
            # where: (-inf - -inf) * 0 is NaN, its limit is 0
            terms_nV = torch.where(a_exps_nV == 0, 0.0, a_nV.sub_(b_nV).mul_(a_exps_nV))
            parts.weighted_N[part] = terms_nV.sum(dim=1)
    return parts


def jsd_sums(
    x_NV: Tensor,
    y_NV: Tensor,
    live_N: Tensor,
    student: RowStats,
    teacher: RowStats,
    *,
    temperature: float,
    teacher_temperature: float,
    columns: Columns,
    beta: float,
) -> PairSums:
    """This shard's share of the JSD and of sum p log(p / m)."""
    zeros_N = torch.zeros_like(student.row_max_N)
    sums = PairSums(zeros_N, zeros_N.clone())
    if columns.valid == 0:
        return sums
    for part in live_chunks(live_N, columns.valid):
        p_nV = _probabilities(x_NV, part, student, temperature, columns)
        q_nV = _probabilities(y_NV, part, teacher, teacher_temperature, columns)
        mixed_nV = beta * q_nV + (1 - beta) * p_nV
        student_n = _log_ratio(p_nV, mixed_nV).mul_(p_nV).sum(dim=1)
        teacher_n = _log_ratio(q_nV, mixed_nV).mul_(q_nV).sum(dim=1)
        sums.value_N[part] = beta * teacher_n + (1 - beta) * student_n
        sums.mean_N[part] = student_n
    return sums


def write_pair_gradient(
    x_NV: Tensor,
    y_NV: Tensor,
    live_N: Tensor,
    stats: PairStats,
    grad_N: Tensor,
    out_NV: Tensor,
    *,
    direction: str,
    beta: float,
    temperature: float,
    teacher_temperature: float,
    columns: Columns,
) -> None:
    """out = g / T * p (h - sum p h), h the derivative of the divergence in p; `out_NV` may be
    `x_NV`. 0 in padded columns and in rows that are not live."""
    out_NV[:, columns.valid :] = 0
    zero_dead_rows(out_NV, live_N)
    if columns.valid == 0:
        return
    for part in live_chunks(live_N, columns.valid):
        p_nV = _probabilities(x_NV, part, stats.student, temperature, columns)
        if direction == "reverse":  # h = log p - log q
            logp_nV = _logprobs(x_NV, part, stats.student, temperature, columns)
            logq_nV = _logprobs(y_NV, part, stats.teacher, teacher_temperature, columns)
            h_nV = logp_nV.sub_(logq_nV).sub_(stats.mean_N[part].unsqueeze(1))
            work_nV = torch.where(p_nV == 0, 0.0, h_nV.mul_(p_nV))
        else:
            q_nV = _probabilities(y_NV, part, stats.teacher, teacher_temperature, columns)
            if direction == "forward":  # h = -q / p, whose p h is -q
                work_nV = p_nV.sub_(q_nV)
            else:  # h = (1 - beta) log(p / m)
                h_nV = _log_ratio(p_nV, beta * q_nV + (1 - beta) * p_nV)
                h_nV.sub_(stats.mean_N[part].unsqueeze(1)).mul_(1 - beta)
                work_nV = h_nV.mul_(p_nV)
        work_nV.mul_(grad_N[part].to(work_nV.dtype).unsqueeze(1) / temperature)
        out_NV[part, : columns.valid] = work_nV


def _dtype(a: Tensor, b: Tensor) -> torch.dtype:
    return torch.promote_types(accumulator_dtype(a), accumulator_dtype(b))


def _logprobs(
    logits_NV: Tensor, part: Rows, stats: RowStats, temperature: float, columns: Columns
) -> Tensor:
    work_nV = logits_NV[part, : columns.valid] - stats.row_max_N[part].unsqueeze(1)
    return work_nV.div_(temperature).sub_(stats.log_sum_N[part].unsqueeze(1))


def _probabilities(
    logits_NV: Tensor, part: Rows, stats: RowStats, temperature: float, columns: Columns
) -> Tensor:
    return _logprobs(logits_NV, part, stats, temperature, columns).exp_()


def _log_ratio(p_nV: Tensor, mixed_nV: Tensor) -> Tensor:
    """log(p / m), 0 where p is 0 (there it is only ever multiplied by p)."""
    return torch.where(p_nV == 0, 0.0, (p_nV / mixed_nV).log_())
