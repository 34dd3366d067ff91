"""GAE against sums written out, its two ends, and what stands at dead tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from objective_cases import tensor

from mopd.errors import ConfigError
from mopd.objective.gae import gae


def written_out(rewards, values, gamma, lam) -> list[float]:
    """A_t = sum_l (gamma lam)^l delta_{t+l} of one sequence without gaps."""
    n = len(rewards)
    delta = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)
    ]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_against_the_sum_with_gaps_padding_and_junk(gamma, lam):
    rng = np.random.default_rng(0)
    mask = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    rewards, values = rng.normal(size=mask.shape), rng.normal(size=mask.shape)
    want = np.zeros(mask.shape)
    for i, live in enumerate(mask):
        want[i, live] = written_out(rewards[i, live], values[i, live], gamma, lam)
    for junk in (math.nan, math.inf):
        advantages, returns = gae(
            tensor(np.where(mask, rewards, junk)),
            tensor(np.where(mask, values, junk)),
            tensor(mask, torch.bool),
            gamma=gamma,
            lam=lam,
        )
        np.testing.assert_allclose(advantages.numpy(), want, atol=1e-13)
        np.testing.assert_allclose(returns.numpy(), np.where(mask, want + values, 0), atol=1e-13)


def test_lambda_1_is_the_return_minus_the_value():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 0.5, 0.7]], requires_grad=True)
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1, lam=1)
    assert advantages.tolist()[0] == pytest.approx([0.8, 0.5, 0.3])
    assert returns.tolist()[0] == pytest.approx([1.0, 1.0, 1.0])
    assert not advantages.requires_grad and not returns.requires_grad


def test_bad_parameters():
    one = torch.ones(1, 1)
    for name, text in (("gamma", "GAE's gamma is 1.5"), ("lam", "GAE's lam is 1.5")):
        with pytest.raises(ConfigError, match=text):
            gae(one, one, one.bool(), **{"gamma": 1.0, "lam": 1.0, name: 1.5})
