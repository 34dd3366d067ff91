"""Generalised advantage estimation from a critic's values (arXiv 1506.02438; MATH 4, `ppo_gae`)."""

from __future__ import annotations

import torch
from torch import Tensor

from mopd.errors import ConfigError


def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """([B, T] advantages, [B, T] returns for the critic), float64, detached, 0 at dead tokens.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}
        R_t = A_t + V_t

    t + 1 is the next *live* token; after the last one V and A are 0. lam = 1 is the return minus
    the value, lam = 0 the one-step error.

    rewards_BT: of each token; an outcome reward stands at the last live one. values_BT: V of the
    state in which the token was chosen. Anything may stand at dead tokens.
    Raises ConfigError unless 0 <= gamma, lam <= 1.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ConfigError(f"GAE's {name} is {value}; expected 0 to 1")
    rewards_BT = torch.where(mask_BT, rewards_BT.detach().double(), 0.0)
    values_BT = torch.where(mask_BT, values_BT.detach().double(), 0.0)
    advantages_BT = torch.zeros_like(values_BT)
    next_value_B = next_advantage_B = values_BT.new_zeros(values_BT.shape[0])
    for t in reversed(range(values_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        live_B = mask_BT[:, t]
        advantages_BT[:, t] = torch.where(live_B, advantage_B, 0.0)
        next_advantage_B = torch.where(live_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(live_B, values_BT[:, t], next_value_B)
    return advantages_BT, torch.where(mask_BT, advantages_BT + values_BT, 0.0)
