"""The slow, plain definition of a gathered logprob: what every backend is compared with.

    logprob_n = log_softmax(logits_n / T)[target_n]    (natural log)

Shapes: N rows (tokens), V vocabulary columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -1
"""Target id of a row without a token: its logprob and its gradient are exactly 0."""


def gathered_logprobs_reference(
    logits_NV: Tensor,
    target_ids_N: Tensor,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> Tensor:
    """[N] logprobs of `target_ids_N` (int64), differentiable in `logits_NV` any number of times.

    The softmax runs over the first `valid_vocab` columns only (the rest are the padded rows of an
    LM head). Computed and returned in float32, or in float64 for float64 logits. Raises torch's
    IndexError for an id outside the valid columns that is not IGNORE.
    """
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    out_N = wide_NV.new_zeros(target_ids_N.shape)
    live_N = target_ids_N != IGNORE  # selecting rows keeps NaN in ignored rows out of the graph
    scaled = wide_NV[live_N][:, :valid_vocab] / temperature
    log_softmax = torch.log_softmax(scaled, dim=-1)
    picked = log_softmax.gather(1, target_ids_N[live_N].unsqueeze(1)).squeeze(1)
    return out_N.masked_scatter(live_N, picked)
