"""Batches and configurations that the objective's tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mopd.config.objective import (
    ObjectiveConfig,
    OrmConfig,
    PolicyLossConfig,
    ReferenceKLConfig,
    TeacherSignalConfig,
    TruncationConfig,
)
from mopd.objective.inputs import StepTotals, TokenInputs
from mopd.objective.loss import objective_loss
from mopd.objective.stats import TokenStats

REQUIRED: dict[str, dict[str, float]] = {
    "cispo": {"clip_high": 0.3},
    "dppo_tv": {"delta": 0.1},
    "dppo_kl": {"delta": 0.02},
    "dppo_topk": {"delta": 0.4},
    "kimi": {"mu": 0.7},
}
"""Parameters of the losses that have no published default."""


def objective(**given: Any) -> ObjectiveConfig:
    """ObjectiveConfig from mappings: objective(loss={"name": "ppo"}, aggregation="token")."""
    groups = {
        "teacher": TeacherSignalConfig,
        "orm": OrmConfig,
        "loss": PolicyLossConfig,
        "truncation": TruncationConfig,
        "kl": ReferenceKLConfig,
    }
    return ObjectiveConfig(
        **{
            key: groups[key](**value) if key in groups and isinstance(value, dict) else value
            for key, value in given.items()
        }
    )


def loss_config(name: str) -> dict[str, Any]:
    return {"name": name, **REQUIRED.get(name, {})}


UNWEIGHTED = {"kind": "raw"}
"""w = pi/mu, uncut."""


def tensor(values: Any, dtype: torch.dtype | None = torch.float64) -> Tensor:
    return torch.as_tensor(np.asarray(values), dtype=dtype)


def totals_of(mask: Any, groups: Any = None) -> StepTotals:
    """Of a step that consists of this batch; groups: prompt of each row, by default its own."""
    mask = np.asarray(mask, bool)
    live = mask.any(1)
    ids = np.arange(len(mask)) if groups is None else np.asarray(groups)
    return StepTotals(float(mask.sum()), float(live.sum()), float(len(set(ids[live]))))


def group_tokens(mask: Any, groups: Any) -> np.ndarray:
    """[B]: live tokens of each row's group."""
    mask, groups = np.asarray(mask, bool), np.asarray(groups)
    counts = mask.sum(1)
    return np.array([counts[groups == g].sum() for g in groups], float)


def run(
    student: Any,
    inputs: TokenInputs,
    config: ObjectiveConfig,
    totals: StepTotals | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[float, Tensor, TokenStats]:
    """(loss, dL/d log pi, statistics)."""
    leaf = torch.tensor(np.asarray(student), dtype=dtype, requires_grad=True)
    if totals is None:
        totals = totals_of(inputs.mask_BT.numpy())
    loss, stats = objective_loss(leaf, inputs, config, totals)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad, stats
