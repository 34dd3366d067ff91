"""What the objective is given: tensors of a micro-batch, and the totals of the whole step.

Shapes: B sequences of this micro-batch, T response tokens (padded), K ids of a top-k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenInputs:
    """What is known of each response token besides the student's own logprob.

    Logprobs in nats, float32 or float64. At dead tokens (and in rows without a live one) every
    tensor may hold anything, NaN and inf included. Only `divergence_BT` carries a gradient.
    """

    mask_BT: Tensor
    """bool: live tokens."""
    sampler_logprobs_BT: Tensor
    """log mu: of the rollout engine, when it drew the token."""
    orm_advantage_B: Tensor
    """alpha * A_ORM of the sequence, 0 where there is no verdict; [B, T] if it differs by token
    (GAE)."""
    old_logprobs_BT: Tensor | None = None
    """log pi_old: of the training engine at the batch's first update. None: this is the first
    update, so that pi_old = sg[pi]."""
    teacher_logprobs_BT: Tensor | None = None
    """log T of the sampled token. None: not asked for."""
    reference_logprobs_BT: Tensor | None = None
    """log of the reference policy (objective.kl). None: the teacher is the reference."""
    divergence_BT: Tensor | None = None
    """Signals topk and full: D(student, teacher) at each position, nats, differentiable."""
    student_topk_BTK: Tensor | None = None
    sampler_topk_BTK: Tensor | None = None
    """Detached logprobs of pi and mu on the sampler's top-k ids, the sampled one among them
    (dppo_topk). -inf fills a place without an id."""
    domain_weight_B: Tensor | None = None
    """w_d of the row's domain (objective.balance). None: 1."""
    group_tokens_B: Tensor | None = None
    """Live tokens of the row's prompt group in the whole step. Needed by the aggregation
    `prompt`; the metric prompt_share needs it too."""
    entropy_BT: Tensor | None = None
    """Entropy of the student's distribution, for the metrics only."""


@dataclass(frozen=True)
class StepTotals:
    """Live units of the whole optimizer step, over all micro-batches and ranks."""

    tokens: float
    sequences: float
    """With at least one live token."""
    prompts: float
    """Prompt groups with at least one live token."""


_PER_SEQUENCE = ("domain_weight_B", "group_tokens_B")
_TOPK = ("student_topk_BTK", "sampler_topk_BTK")


def check_inputs(student_BT: Tensor, inputs: TokenInputs, totals: StepTotals) -> None:
    """Raise ValueError unless the shapes, the mask's type and the totals fit together."""
    if student_BT.dim() != 2:
        raise ValueError(f"student_logprobs_BT is {tuple(student_BT.shape)}; expected [B, T]")
    for field in fields(inputs):
        tensor = getattr(inputs, field.name)
        if tensor is None:
            continue
        shape, wanted = tuple(tensor.shape), tuple(student_BT.shape)
        if field.name in _PER_SEQUENCE:
            fits = shape == wanted[:1]
        elif field.name == "orm_advantage_B":
            fits = shape in (wanted[:1], wanted)
        elif field.name in _TOPK:
            fits = tensor.dim() == 3 and shape[:2] == wanted
        else:
            fits = shape == wanted
        if not fits:
            raise ValueError(
                f"{field.name} is {shape}; expected one that goes with student_logprobs_BT {wanted}"
            )
    topk = [getattr(inputs, name) for name in _TOPK]
    if any(t is not None for t in topk) and len({None if t is None else t.shape for t in topk}) > 1:
        raise ValueError(f"{' and '.join(_TOPK)} differ in shape, or one is missing")
    if inputs.mask_BT.dtype != torch.bool:
        raise ValueError(f"mask_BT is {inputs.mask_BT.dtype}; expected torch.bool")
    for name, value in vars(totals).items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"totals.{name} is {value}; expected the step's live {name}")
        if value < 1 and bool(inputs.mask_BT.any()):
            raise ValueError(
                f"totals.{name} is {value} and there are live tokens here; expected the count of "
                f"live {name} over all micro-batches and ranks of the step"
            )
