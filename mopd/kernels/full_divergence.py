"""Divergence from a teacher over the whole vocabulary, differentiable in the student.

With p = softmax(x / T) the student's and q = softmax(y / T') the teacher's distribution:

    reverse   KL(p || q)      forward   KL(q || p)
    jsd       beta KL(q || m) + (1 - beta) KL(p || m),   m = beta q + (1 - beta) p

(the generalised JSD of arXiv 2306.13649, teacher first). The gradient in x is

    g / T * p (h - sum p h),   h = log p - log q | -q / p | (1 - beta) log(p / m)

Either side may be logits, or hidden states with an LM head (`Head`), whose logits are made tile by
tile and never whole. A KL takes one read of both logits; the JSD, which is not a sum over one
normaliser, takes two. Each pass ends in one all-reduce of maxima and one of sums.

Shapes: N rows, V columns of this rank's vocabulary shard, H hidden size, [n, c] one tile.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.kernels.autograd import begin_backward, end_backward
from mopd.kernels.backends import backend_module
from mopd.kernels.checks import (
    check_direction,
    check_head,
    check_pair,
    check_temperature,
    shard_columns,
)
from mopd.kernels.head import Head, HeadGradient, row_blocks
from mopd.kernels.pair_partials import PairPartials, PairStats, merge_pairs
from mopd.kernels.pair_sides import PairOptions, PairSides, tile_columns
from mopd.kernels.partials import RowStats
from mopd.kernels.torch_rows import accumulator_dtype
from mopd.kernels.vocab_parallel import all_reduced, several


def full_divergence(
    student: Tensor | Head,
    teacher: Tensor | Head,
    *,
    direction: str = "reverse",
    beta: float | None = None,
    mask_N: Tensor | None = None,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    valid_vocab: int | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    inplace_backward: bool = False,
    reduce_hidden_grad: bool = True,
) -> Tensor:
    """[N] divergences in nats (float32; float64 for float64 inputs), differentiable in the student.

    student: [N, V] logits, or `Head(hidden_NH, weight_VH)`, whose gradients go to both tensors.
    teacher: the same of the teacher, for the same rows and the same vocabulary shard; no gradient.
    direction, beta: "reverse", "forward", or "jsd" with 0 < beta < 1.
    mask_N: [N] bool; False rows give exactly 0 and no gradient, whatever they hold. None: all.
    temperature, teacher_temperature: of the student's and of the teacher's softmax.
    valid_vocab, vocab_start, group: as in `gathered.gathered_scores`. The two may be padded to
        different widths if valid_vocab is given.
    inplace_backward: the gradient is written over the student's logits; not with a student `Head`.
    reduce_hidden_grad: as in `fused_head.fused_head_scores`.

    A teacher probability of 0 where the student's is not makes the reverse KL +inf (and the other
    way round for the forward one): the caller keeps such rows out. Raises ValueError and
    ConfigError as `gathered_scores`.
    """
    check_direction(direction, beta)
    check_temperature(temperature)
    check_temperature(teacher_temperature, "teacher_temperature")
    x, weight = _parts(student)
    y, teacher_weight = _parts(teacher)
    rows = x.shape[0]
    for side in (student, teacher):
        if isinstance(side, Head):
            check_head(side.hidden_NH, side.weight_VH, rows, side.logits_dtype)
    width = _width(student)
    check_pair(x, y, mask_N, width, _width(teacher), valid_vocab)
    if inplace_backward and isinstance(student, Head):
        raise ValueError("inplace_backward=True needs student logits; a Head has none to overwrite")
    live_N = torch.ones(rows, dtype=torch.bool, device=x.device) if mask_N is None else mask_N
    options = PairOptions(
        backend_module("pairs", backend, x.device.type),
        direction,
        0.0 if beta is None else float(beta),
        float(temperature),
        float(teacher_temperature),
        shard_columns(min(width, _width(teacher)), valid_vocab, vocab_start),
        several(group),
        inplace_backward,
        student.logits_dtype if isinstance(student, Head) else None,
        teacher.logits_dtype if isinstance(teacher, Head) else None,
        reduce_hidden_grad,
    )
    value_N: Tensor = FullDivergence.apply(
        x,
        weight,
        y.detach(),
        None if teacher_weight is None else teacher_weight.detach(),
        live_N.contiguous(),
        options,
    )
    return value_N


def _parts(side: Tensor | Head) -> tuple[Tensor, Tensor | None]:
    return (side.hidden_NH, side.weight_VH) if isinstance(side, Head) else (side, None)


def _width(side: Tensor | Head) -> int:
    return side.weight_VH.shape[0] if isinstance(side, Head) else side.shape[-1]


class FullDivergence(torch.autograd.Function):
    """(student logits, or hidden and weight; teacher's; live rows) -> divergences [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        y: Tensor,
        teacher_weight: Tensor | None,
        live_N: Tensor,
        options: PairOptions,
    ) -> Tensor:
        sides = PairSides(x, weight, y, teacher_weight, live_N, options)
        value_N, stats = _combine(sides)
        ctx.save_for_backward(
            x,
            weight,
            y,
            teacher_weight,
            live_N,
            stats.student.row_max_N,
            stats.student.log_sum_N,
            stats.teacher.row_max_N,
            stats.teacher.log_sum_N,
            stats.mean_N,
        )
        ctx.options = options
        ctx.inplace_backward, ctx.consumed = options.inplace_backward, False
        return torch.where(live_N, value_N, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Any, ...]:
        begin_backward(ctx, "full_divergence", "full_divergence_reference")
        x, weight, y, teacher_weight, live_N, *numbers = ctx.saved_tensors
        x_max_N, x_log_N, y_max_N, y_log_N, mean_N = numbers
        if weight is not None:  # a dead row may hold NaN, and 0 * NaN would reach d_weight
            x = x.masked_fill(~live_N.unsqueeze(1), 0.0)
        options: PairOptions = ctx.options
        sides = PairSides(x.detach(), weight, y, teacher_weight, live_N, options)
        stats = PairStats(RowStats(x_max_N, x_log_N), RowStats(y_max_N, y_log_N), mean_N)
        if weight is None:
            out_NV = x.detach() if options.inplace_backward else torch.empty_like(x)
            out_NV[:, options.columns.valid :] = 0
            for block, part in sides.tiles():
                sides.write_gradient(stats, grad_N, block, part, out_NV[block, part])
            end_backward(ctx, out_NV)
            return out_NV, None, None, None, None, None
        head = Head(x.detach(), weight, options.student_dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        gradient = HeadGradient(head, hidden=needs_hidden, weight=needs_weight)
        for part in sides.columns():
            for block in row_blocks(x.shape[0]):
                out_nc = x.new_empty(block.stop - block.start, part.stop - part.start)
                sides.write_gradient(stats, grad_N, block, part, out_nc)
                gradient.add(block, part, out_nc)
            gradient.end_columns(part)
        grad_NH = gradient.hidden_NH
        if grad_NH is not None:
            group = options.group if options.reduce_hidden_grad else None
            grad_NH = all_reduced(grad_NH, dist.ReduceOp.SUM, group).to(x.dtype)
        return grad_NH, gradient.weight_VH, None, None, None, None


def _combine(sides: PairSides) -> tuple[Tensor, PairStats]:
    """([N] divergences, the numbers the backward needs), equal on every rank of the group."""
    options, live_N = sides.options, sides.live_N
    forward = options.direction == "forward"
    temperatures = options.temperature, options.teacher_temperature
    a_temperature, b_temperature = temperatures[::-1] if forward else temperatures
    dtype = torch.promote_types(accumulator_dtype(sides.x), accumulator_dtype(sides.y))
    whole = PairPartials.nothing(live_N, dtype)
    for block, part in sides.tiles():
        a_nc, b_nc = sides.student(block, part), sides.teacher(block, part)
        if forward:
            a_nc, b_nc = b_nc, a_nc
        partials = options.backend.pair_partials(
            a_nc,
            b_nc,
            live_N[block],
            a_temperature=a_temperature,
            b_temperature=b_temperature,
            columns=tile_columns(part),
            weighted=options.direction != "jsd",
        )
        if part.start > 0:
            partials = merge_pairs([whole.rows(block), partials], a_temperature, b_temperature)
        whole.rows(block).assign(partials)

    a, b, kl_N = _reduce(whole, live_N, a_temperature, b_temperature, options.group)
    student, teacher = (b, a) if forward else (a, b)
    if options.direction != "jsd":
        return kl_N, PairStats(student, teacher, kl_N)
    sums_SN = torch.zeros((2, len(live_N)), dtype=dtype, device=live_N.device)
    for block, part in sides.tiles():
        sums = options.backend.jsd_sums(
            sides.student(block, part),
            sides.teacher(block, part),
            live_N[block],
            student.rows(block),
            teacher.rows(block),
            temperature=options.temperature,
            teacher_temperature=options.teacher_temperature,
            columns=tile_columns(part),
            beta=options.beta,
        )
        sums_SN[0, block] += sums.value_N
        sums_SN[1, block] += sums.mean_N
    all_reduced(sums_SN, dist.ReduceOp.SUM, options.group)
    return sums_SN[0], PairStats(student, teacher, sums_SN[1])


def _reduce(
    mine: PairPartials,
    live_N: Tensor,
    a_temperature: float,
    b_temperature: float,
    group: dist.ProcessGroup | None,
) -> tuple[RowStats, RowStats, Tensor]:
    """(normaliser of A, of B, KL(A || B)) over all ranks."""
    if group is not None:
        max_2N = all_reduced(torch.stack([mine.a_max_N, mine.b_max_N]), dist.ReduceOp.MAX, group)
        mine = mine.moved_to(max_2N[0], max_2N[1], a_temperature, b_temperature)
    max_2N = torch.stack([mine.a_max_N, mine.b_max_N])
    sums_3N = torch.stack([mine.a_sum_N, mine.b_sum_N, mine.weighted_N])
    all_reduced(sums_3N, dist.ReduceOp.SUM, group)
    sums_3N = torch.where(live_N, sums_3N, 1.0)
    max_2N = torch.where(live_N, max_2N, 0.0)
    log_a_N, log_b_N = sums_3N[0].log(), sums_3N[1].log()
    kl_N = sums_3N[2] / sums_3N[0] - log_a_N + log_b_N
    return RowStats(max_2N[0], log_a_N), RowStats(max_2N[1], log_b_N), kl_N
