"""From per-token terms to one number, with denominators that the whole step shares (MATH 6).

A rank or micro-batch sees a part of the step. Each function returns that part's share, so that
the shares of any split add up to the step's value, and their gradients to its gradient.
Shapes: B sequences of this micro-batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Aggregation = Callable[[Tensor, Tensor, float], Tensor]
"""(term_BT with 0 at dead tokens, tokens_B, sequences of the whole step) -> scalar."""


def sequence(term_BT: Tensor, tokens_B: Tensor, num_sequences: float) -> Tensor:
    """1/N sum_i 1/|y_i| sum_t term_it: mean over a sequence's tokens, then over sequences.

    tokens_B: |y_i| by the denominator chosen; a sequence with none contributes 0.
    num_sequences: N, live sequences in the whole step, over all micro-batches and ranks.
    """
    mean_B = term_BT.sum(dim=1) / tokens_B.clamp(min=1).to(term_BT.dtype)
    return mean_B.sum() / max(num_sequences, 1.0)


AGGREGATIONS: dict[str, Aggregation] = {"sequence": sequence}
