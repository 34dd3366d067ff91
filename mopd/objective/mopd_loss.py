"""The MOPD objective, exactly as MATH 1 (MiMo-V2-Flash technical report, eq. 5-9).

    L = -1/N sum_i 1/|y_i| sum_t  w_it  A_it  log pi(y_it)

    w = sg[pi/mu] inside the IcePop band, else 0       A = clip(sg[log T - log pi]) + alpha A_ORM

pi is the student as the trainer computes it now, mu the student as the rollout engine sampled it,
T the teacher of the sample's domain; sg stops the gradient, which flows through `log pi` alone.
N counts the live sequences of the whole step, so micro-batches and ranks add up.
Shapes: B sequences, T response tokens (padded).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.objective.advantage import distillation_advantage, with_orm
from mopd.objective.aggregation import AGGREGATIONS
from mopd.objective.registry import lookup
from mopd.objective.stats import TokenStats
from mopd.objective.truncation import icepop

DENOMINATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "response": lambda live_BT, kept_BT: live_BT.sum(dim=1),
    "kept": lambda live_BT, kept_BT: kept_BT.sum(dim=1),
}
"""|y| of each sequence: as printed, dropped tokens stay in it ('response')."""


@dataclass(frozen=True)
class TokenInputs:
    """What is known of each response token besides the student's own logprob. Nats, float32."""

    sampler_logprobs_BT: Tensor
    """log mu of the sampled token."""
    teacher_logprobs_BT: Tensor
    """log T of the sampled token."""
    mask_BT: Tensor
    """bool: live tokens. Elsewhere the other tensors may hold anything, NaN and inf included."""
    orm_advantage_B: Tensor
    """alpha * A_ORM of the sequence; 0 where there is no verdict."""
    entropy_BT: Tensor | None = None
    """Entropy of the student's distribution, for the metrics only."""


def mopd_loss(
    student_logprobs_BT: Tensor,
    inputs: TokenInputs,
    *,
    icepop_low: float,
    icepop_high: float,
    advantage_clip: float,
    denominator: str,
    aggregation: str,
    num_sequences: float,
) -> tuple[Tensor, TokenStats]:
    """(scalar loss share of this micro-batch, detached per-token statistics).

    student_logprobs_BT: log pi of the sampled tokens, carries the gradient. Computed in float32,
        or float64 if it is.
    num_sequences: sequences with a live token in the whole step, over all micro-batches and ranks.
        The gradients of all micro-batches and ranks are to be *summed*.

    A micro-batch without live tokens gives loss and gradients of exactly 0. A NaN in a live token
    makes the loss NaN: it is a fault upstream and must not pass as a dropped token.
    Raises ConfigError for unknown names and impossible bounds, ValueError for shapes.
    """
    live_BT = inputs.mask_BT
    _check(student_logprobs_BT, inputs, num_sequences)
    aggregate = lookup(AGGREGATIONS, aggregation, "objective.aggregation")
    count_tokens = lookup(DENOMINATORS, denominator, "objective.denominator")

    # where before any arithmetic: what stands in dead tokens reaches neither value nor gradient
    student_BT = torch.where(live_BT, _at_least_float32(student_logprobs_BT), 0.0)
    sampler_BT = torch.where(live_BT, inputs.sampler_logprobs_BT.detach().to(student_BT), 0.0)
    teacher_BT = torch.where(live_BT, inputs.teacher_logprobs_BT.detach().to(student_BT), 0.0)

    log_ratio_BT = student_BT.detach() - sampler_BT
    weight_BT, in_band_BT = icepop(log_ratio_BT, icepop_low, icepop_high)
    kept_BT = in_band_BT & live_BT
    distil_BT, clipped_BT = distillation_advantage(teacher_BT, student_BT, advantage_clip)
    live_row_B = live_BT.any(dim=1)
    orm_B = torch.where(live_row_B, inputs.orm_advantage_B, 0.0)
    advantage_BT = torch.where(live_BT, with_orm(distil_BT, orm_B), 0.0)

    coefficient_BT = torch.where(kept_BT, weight_BT * advantage_BT, 0.0)
    term_BT = coefficient_BT * torch.where(kept_BT, student_BT, 0.0)
    broken_BT = student_BT.isnan() | sampler_BT.isnan() | teacher_BT.isnan()
    term_BT = torch.where(broken_BT, math.nan, term_BT)
    loss = -aggregate(term_BT, count_tokens(live_BT, kept_BT), num_sequences)

    entropy_BT = inputs.entropy_BT
    stats = TokenStats(
        reverse_kl_BT=student_BT.detach() - teacher_BT,
        advantage_BT=advantage_BT,
        clipped_BT=clipped_BT,
        kept_BT=kept_BT,
        log_ratio_BT=log_ratio_BT,
        entropy_BT=None if entropy_BT is None else torch.where(live_BT, entropy_BT.detach(), 0.0),
    )
    return loss, stats


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _check(student_BT: Tensor, inputs: TokenInputs, num_sequences: float) -> None:
    shapes = {
        "sampler_logprobs_BT": inputs.sampler_logprobs_BT.shape,
        "teacher_logprobs_BT": inputs.teacher_logprobs_BT.shape,
        "mask_BT": inputs.mask_BT.shape,
    }
    if inputs.entropy_BT is not None:
        shapes["entropy_BT"] = inputs.entropy_BT.shape
    wrong = {name: tuple(shape) for name, shape in shapes.items() if shape != student_BT.shape}
    if student_BT.dim() != 2 or wrong:
        raise ValueError(
            f"student_logprobs_BT is {tuple(student_BT.shape)}; expected [B, T] like the rest, "
            f"got {wrong}"
        )
    if inputs.orm_advantage_B.shape != student_BT.shape[:1]:
        raise ValueError(
            f"orm_advantage_B is {tuple(inputs.orm_advantage_B.shape)}; expected "
            f"[{student_BT.shape[0]}], one number a sequence"
        )
    if inputs.mask_BT.dtype != torch.bool:
        raise ValueError(f"mask_BT is {inputs.mask_BT.dtype}; expected torch.bool")
    if not (math.isfinite(num_sequences) and num_sequences >= 0):
        raise ValueError(f"num_sequences is {num_sequences}; expected the step's live sequences")
    if num_sequences < 1 and bool(inputs.mask_BT.any()):
        raise ValueError(
            f"num_sequences is {num_sequences} and there are live tokens here; expected the count "
            "of live sequences over all micro-batches and ranks of the step"
        )
