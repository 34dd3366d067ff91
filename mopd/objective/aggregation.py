"""From per-token terms to one number, with denominators that the whole step shares (MATH 6).

Every aggregation is a weight a sequence: L = sum_i c_i sum_t term_it. A rank or micro-batch sees a
part of the step; as c_i depends on totals of the whole step and on its own sequence or prompt
group only, the shares of any split add up to the step's value, and their gradients to its gradient.
Shapes: B sequences of this micro-batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mopd.errors import ConfigError
from mopd.objective.inputs import StepTotals


@dataclass(frozen=True)
class Lengths:
    """What the weights are made of; float64."""

    tokens_B: Tensor
    """|y_i|, by the denominator chosen: live tokens, or those kept."""
    group_tokens_B: Tensor | None
    """Live tokens of the row's prompt group in the whole step."""
    totals: StepTotals
    constant: float | None
    """Dr.GRPO's L, tokens."""


def token(lengths: Lengths) -> Tensor:
    """1 / all live tokens: mean over tokens (DAPO). Long answers weigh more."""
    return lengths.tokens_B.new_full(lengths.tokens_B.shape, 1 / max(lengths.totals.tokens, 1.0))


def per_sequence(lengths: Lengths) -> Tensor:
    """1 / (N |y_i|): mean over a sequence's tokens, then over sequences (GRPO, MiMo's MOPD)."""
    return 1 / (lengths.tokens_B.clamp(min=1) * max(lengths.totals.sequences, 1.0))


def prompt(lengths: Lengths) -> Tensor:
    """1 / (P tokens of the group): mean over a prompt's tokens, then over prompts (ScaleRL)."""
    if lengths.group_tokens_B is None:
        raise ValueError("the aggregation 'prompt' needs group_tokens_B; it is missing")
    return 1 / (lengths.group_tokens_B.clamp(min=1) * max(lengths.totals.prompts, 1.0))


def constant(lengths: Lengths) -> Tensor:
    """1 / (N L) with a constant L: sums of sequences, unbiased by length (Dr.GRPO)."""
    if lengths.constant is None or not lengths.constant > 0:
        raise ConfigError(
            f"objective.constant_length is {lengths.constant}; the aggregation 'constant' needs a "
            "number of tokens > 0, such as rollout.max_response_tokens."
        )
    share = 1 / (lengths.constant * max(lengths.totals.sequences, 1.0))
    return lengths.tokens_B.new_full(lengths.tokens_B.shape, share)


SEQUENCE_WEIGHTS: dict[str, Callable[[Lengths], Tensor]] = {
    "token": token,
    "sequence": per_sequence,
    "prompt": prompt,
    "constant": constant,
}
"""name -> f(lengths) -> [B] float64 weights of the sequences' summed terms."""
