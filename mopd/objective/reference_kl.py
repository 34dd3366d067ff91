"""Regularisers toward a reference policy, per sampled token, to be added to the loss (MATH 5).

With d = log pi - log ref of a token y ~ pi, three estimators of KL(pi || ref) are usual: k1 = d,
k2 = d^2/2, k3 = exp(-d) - 1 + d (J. Schulman, "Approximating KL divergence"). As *values* they
agree in expectation near pi = ref. As *losses*, differentiated with the sample held fixed, they
do not:
    k1  E[grad d] = E[grad log pi] = 0: trains nothing. Not offered.
    k2  E[d grad log pi]           = grad KL(pi || ref), the reverse KL's gradient.
    k3  E[(1 - ref/pi) grad log pi] = grad KL(ref || pi), the forward KL's gradient.
Samples of mu instead of pi need the weight pi/mu as the policy loss does; the objective applies
the truncation's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def k2(log_gap: Tensor) -> Tensor:
    """d^2 / 2 of d = log pi - log ref, nats^2."""
    return log_gap.square() / 2


def k3(log_gap: Tensor) -> Tensor:
    """exp(-d) - 1 + d >= 0 of d = log pi - log ref, nats.

    Its gradient grows as ref/pi: one token that the reference thinks likely and pi does not can
    outweigh the batch. GRPO's regulariser (arXiv 2402.03300 eq. 4).
    """
    return torch.expm1(-log_gap) + log_gap


REFERENCE_KL: dict[str, Callable[[Tensor], Tensor]] = {"k2": k2, "k3": k3}
