"""How far the student still is from its teacher on answers of its own to held-out prompts.

For tokens drawn from the student, with log-ratio d = log pi - log T (nats):

    k1  mean of d                      unbiased for KL(pi || T) per token; noisy, can be negative
    k3  mean of exp(-d) - 1 + d        unbiased too, never negative   (Schulman, "Approximating KL")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mopd.evaluation.metrics import Floats, interval, paired_bootstrap


def held_out_divergence(
    student_logprobs: Sequence[Sequence[float]],
    teacher_logprobs: Sequence[Sequence[float]],
    *,
    replicates: int,
    seed: int,
) -> dict[str, Any]:
    """KL(student || teacher) per token, with intervals over answers.

    Args:
        student_logprobs: answers, [R] each: log pi of every token at temperature 1.
        teacher_logprobs: the same tokens' log T.

    Returns:
        ``k1``, ``k3`` (nats a token), ``k1_ci95``, ``k3_ci95``, ``tokens``, ``answers``.
    """
    sums: list[list[float]] = []
    for own, theirs in zip(student_logprobs, teacher_logprobs, strict=True):
        gaps = [a - b for a, b in zip(own, theirs, strict=True)]
        # Past e^30 a single token would be all there is to see, and overflow comes near.
        k3 = [math.exp(min(-d, 30.0)) - 1.0 + d for d in gaps]
        if gaps:
            sums.append([math.fsum(gaps), math.fsum(k3), float(len(gaps))])
    if not sums:
        none = [None, None]
        return {"k1": None, "k3": None, "k1_ci95": none, "k3_ci95": none, "tokens": 0, "answers": 0}
    table: Floats = np.array(sums)
    means = paired_bootstrap(table, replicates=replicates, seed=seed)
    total = table.sum(axis=0)
    return {
        "k1": float(total[0] / total[2]),
        "k3": float(total[1] / total[2]),
        "k1_ci95": interval(means[:, 0] / means[:, 2]),
        "k3_ci95": interval(means[:, 1] / means[:, 2]),
        "tokens": int(total[2]),
        "answers": len(sums),
    }
