"""Arguments that break a kernel's contract, refused by `ValueError` before anything runs.

These are our own callers' mistakes, not users'; looking at shapes only, they cost no device sync.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mopd.kernels.partials import Columns

DIRECTIONS = ("reverse", "forward", "jsd")


def check_rows(logits: Tensor, ids: Tensor, inplace_backward: bool = False) -> None:
    """[N, V] floating-point logits with [N] or [N, K] int64 ids on the same device."""
    if logits.dim() != 2 or ids.shape[:1] != logits.shape[:1] or ids.dtype != torch.int64:
        raise ValueError(
            f"got logits {tuple(logits.shape)} and target ids {tuple(ids.shape)} "
            f"{ids.dtype}; expected [N, V] logits and as many rows of int64 target ids"
        )
    if not logits.is_floating_point():
        raise ValueError(f"got {logits.dtype} logits; expected a floating-point dtype")
    if logits.device != ids.device:
        raise ValueError(f"logits are on {logits.device}, target ids on {ids.device}")
    overlapping = any(
        stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)
    )
    if inplace_backward and overlapping:
        raise ValueError(
            f"inplace_backward=True needs logits whose elements do not share memory; got strides "
            f"{logits.stride()} for shape {tuple(logits.shape)} (an expanded view)"
        )


def check_head(hidden: Tensor, weight: Tensor, rows: int, logits_dtype: torch.dtype | None) -> None:
    """[N, H] hidden states and [V, H] weights of one floating-point dtype on one device."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"got hidden states {tuple(hidden.shape)} and head weights {tuple(weight.shape)}; "
            "expected [N, H] and [V, H]"
        )
    if hidden.shape[0] != rows:
        raise ValueError(f"got {hidden.shape[0]} rows of hidden states for {rows} rows of ids")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"hidden states are {hidden.dtype}, head weights {weight.dtype}; expected one "
            "floating-point dtype (give logits_dtype=torch.float32 for float32 logits of both)"
        )
    if hidden.device != weight.device:
        raise ValueError(f"hidden states are on {hidden.device}, head weights on {weight.device}")
    if logits_dtype not in (None, hidden.dtype, torch.float32):
        raise ValueError(
            f"logits_dtype is {logits_dtype}; expected None (the weights' {hidden.dtype}) or "
            "torch.float32"
        )


def check_temperature(temperature: float, name: str = "temperature") -> None:
    """A finite number above 0."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"{name} is {temperature}; expected a finite number above 0 (the temperature "
            "the tokens were sampled at)"
        )


def shard_columns(shard: int, valid_vocab: int | None, vocab_start: int) -> Columns:
    """The real columns of a shard `shard` wide that begins at token id `vocab_start`."""
    if vocab_start < 0 or (valid_vocab is not None and valid_vocab < 1):
        raise ValueError(
            f"vocab_start is {vocab_start} and valid_vocab {valid_vocab}; expected >= 0 and >= 1"
        )
    valid = shard if valid_vocab is None else min(max(valid_vocab - vocab_start, 0), shard)
    return Columns(vocab_start, valid)


def check_direction(direction: str, beta: float | None) -> None:
    """`reverse` and `forward` take no beta, `jsd` takes 0 < beta < 1."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; expected one of {', '.join(DIRECTIONS)}")
    if direction == "jsd" and not (beta is not None and 0 < beta < 1):
        raise ValueError(
            f"beta is {beta}; expected 0 < beta < 1 with direction 'jsd' (its ends are 'forward' "
            "and 'reverse', up to a factor)"
        )
    if direction != "jsd" and beta is not None:
        raise ValueError(f"beta is {beta}, which direction {direction!r} has no use for; omit it")


def check_pair(
    x: Tensor,
    y: Tensor,
    mask_N: Tensor | None,
    width: int,
    teacher_width: int,
    valid_vocab: int | None,
) -> None:
    """Student's and teacher's rows, devices and vocabulary widths belong together."""
    if x.dim() != 2 or y.dim() != 2 or x.shape[0] != y.shape[0]:
        raise ValueError(
            f"got a student of shape {tuple(x.shape)} and a teacher of {tuple(y.shape)}; expected "
            "[N, V] logits, or [N, H] hidden states, of the same N rows"
        )
    if not (x.is_floating_point() and y.is_floating_point()):
        raise ValueError(f"got {x.dtype} and {y.dtype}; expected floating-point dtypes")
    if x.device != y.device:
        raise ValueError(f"the student is on {x.device}, the teacher on {y.device}")
    if valid_vocab is None and width != teacher_width:
        raise ValueError(
            f"the student has {width} vocabulary columns, the teacher {teacher_width}; give "
            "valid_vocab, the size of the vocabulary they share, to leave out the padding"
        )
    if mask_N is not None and (mask_N.dtype != torch.bool or mask_N.shape != x.shape[:1]):
        raise ValueError(
            f"got mask {tuple(mask_N.shape)} {mask_N.dtype}; expected [{x.shape[0]}] bool"
        )
