"""The advantage of a sampled token: what its teacher thinks of it, plus what its answer earned.

    A = weight * clip(sg[log T - log pi]) + alpha * A_ORM        (MATH 1, MiMo-V2-Flash eq. 9)

The clip is not in the paper. It leaves pi = T stationary and biases the gradient elsewhere, hence
the mask of where it bit. It applies to the distillation part only.
Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mopd.errors import ConfigError


def distillation_advantage(
    teacher_logprobs: Tensor, student_logprobs: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """(advantage, clipped): sg[log T - log pi] held to [-clip, clip], and a mask of where it bit.

    Any equal shapes; nats; no gradient flows through either argument. clip = 0 turns it off.
    """
    if not (math.isfinite(clip) and clip >= 0):
        raise ConfigError(
            f"objective.teacher.clip is {clip}; expected a finite number of nats >= 0 (0: off)."
        )
    raw = teacher_logprobs.detach() - student_logprobs.detach()
    if clip == 0:
        return raw, torch.zeros_like(raw, dtype=torch.bool)
    return raw.clamp(-clip, clip), raw.abs() > clip


def reward_to_go(advantage_BT: Tensor) -> Tensor:
    """[B, T]: sum over t' >= t of A_t'. 0 must stand at dead tokens.

    MATH 11.7: with log T - log pi summed so, the expected gradient is that of the whole
    sequence's reverse KL; the token's own alone takes the distribution of states as given. It
    grows, and its variance with it, with the tokens that are left.
    """
    return advantage_BT.flip(1).cumsum(1).flip(1)


def with_orm(advantage_BT: Tensor, orm_advantage: Tensor) -> Tensor:
    """[B, T]: every token of a sequence gets the sequence's alpha * A_ORM on top ([B]), or its own
    ([B, T])."""
    orm = orm_advantage.detach().to(advantage_BT.dtype)
    return advantage_BT + (orm.unsqueeze(1) if orm.dim() == 1 else orm)
