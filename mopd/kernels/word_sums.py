"""A fingerprint of weights that parts of a tensor, wherever they lie, can add up to."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bit patterns, read as integers of its element's size: int64 scalar.

    The parts of a tensor add up to the sum of the whole (modulo 2^64), so that ranks which each
    hold a part need not meet. Any one wrong bit, and a tensor that is missing, stale or another's,
    changes it; the order of a tensor's elements does not.
    """
    return tensor.detach().view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64)


def word_sums(tensors: list[Tensor]) -> list[int]:
    """`word_sum` of each."""
    if not tensors:
        return []
    return torch.stack([word_sum(tensor) for tensor in tensors]).tolist()
