"""Rows taken a few at a time by the torch backends, so that their temporaries stay small."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

CHUNK_ELEMENTS = 1 << 20
"""Logits per chunk: 4 MiB of float32, which stays in a CPU's cache."""

Rows = slice | Tensor
"""Which rows a chunk is of: a slice where they lie together, else their indices."""


def live_chunks(live_N: Tensor, columns: int) -> Iterator[Rows]:
    """The live rows, in order, at most CHUNK_ELEMENTS / columns (and at least one) at a time.

    Dead rows are in no chunk: they cost nothing. On an accelerator this waits for the device once.
    """
    index_L = live_N.nonzero().squeeze(1)
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for part_n in index_L.split(step):
        if len(part_n) == 0:  # split gives one empty part of nothing
            continue
        first, last = int(part_n[0]), int(part_n[-1])
        yield slice(first, last + 1) if last - first + 1 == len(part_n) else part_n
