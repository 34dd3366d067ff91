"""Who computes which sequences, in which forward. Pure, the same on every rank.

A micro-batch index is one forward (and backward) of every data-parallel rank. Every rank gets the
same number of them, so that no collective waits for a rank that has nothing to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mopd.config.schema import StudentConfig


@dataclass(frozen=True)
class MicrobatchPlan:
    """One micro-batch index of the whole step."""

    lengths: tuple[int, ...]
    """[dp] positions of a row (S) on each data-parallel rank."""
    rows: tuple[tuple[int | None, ...], ...]
    """[dp][B] sequence indices: one a row, or all of them end to end in one row. None stands for
    padding that takes no part in anything."""


def plan(lengths: Sequence[int], dp: int, config: StudentConfig) -> list[MicrobatchPlan]:
    """Deal sequences of `lengths` input positions to ranks and forwards, as `student` says."""
    multiple_of = config.parallel.tp  # sequence parallelism cuts a row over the tp ranks
    if config.max_tokens_per_microbatch is not None:
        return plan_by_tokens(
            lengths, dp, config.max_tokens_per_microbatch, multiple_of, packed=config.packing
        )
    plans = plan_by_count(lengths, dp, config.micro_batch_size, multiple_of)
    return [_packed(p, lengths, multiple_of) for p in plans] if config.packing else plans


def plan_by_count(
    lengths: Sequence[int], dp: int, micro_batch_size: int, multiple_of: int = 1
) -> list[MicrobatchPlan]:
    """At most `micro_batch_size` sequences a forward and rank; one shape on all ranks.

    Longest first, neighbours together: little padding, and a step that does not fit in memory
    fails at once. Sizes are as even as they can be. Empty for no sequences.
    """
    order = _longest_first(lengths)
    count = math.ceil(len(order) / (dp * micro_batch_size))
    plans = []
    start = 0
    for index in range(count):
        size = math.ceil((len(order) - start) / (count - index))
        size = min(math.ceil(size / dp) * dp, len(order) - start)
        chosen = order[start : start + size]
        start += size
        rows = math.ceil(size / dp)
        dealt = [
            tuple(
                chosen[rank + dp * row] if rank + dp * row < size else None for row in range(rows)
            )
            for rank in range(dp)
        ]
        longest = _round_up(max(lengths[i] for i in chosen), multiple_of)
        plans.append(MicrobatchPlan((longest,) * dp, tuple(dealt)))
    assert start == len(order)
    return plans


def plan_by_tokens(
    lengths: Sequence[int], dp: int, max_tokens: int, multiple_of: int = 1, *, packed: bool
) -> list[MicrobatchPlan]:
    """At most `max_tokens` positions a forward and rank, padding included; shapes may differ.

    No sequence may be longer than `max_tokens` (`batching.refusals` says which are). As few
    forwards as runs of neighbours in length allow, and then as even in tokens as they can be.
    """
    if not lengths:
        return []
    order = _longest_first(lengths)

    def groups(limit: int) -> list[list[int]]:
        out: list[list[int]] = []
        used = 0
        for index in order:
            own = lengths[index]
            # Padded rows are all as long as the first, which is the longest.
            more = own if packed else _round_up(lengths[out[-1][0]] if out else own, multiple_of)
            if out and _round_up(used + more, multiple_of) <= limit:
                out[-1].append(index)
                used += more
            else:
                out.append([index])
                used = own if packed else _round_up(own, multiple_of)
        return out

    limit = _round_up(max_tokens, multiple_of)
    count = math.ceil(len(groups(limit)) / dp) * dp
    low = _round_up(max(lengths), multiple_of)
    while low < limit:  # the smallest limit that needs no more forwards
        middle = (low + limit) // 2
        if len(groups(middle)) <= count:
            limit = middle
        else:
            low = middle + 1
    dealt = groups(limit)
    while len(dealt) < count and max(map(len, dealt)) > 1:
        # A rank would have nothing to do: halve the group with the most sequences.
        place = max(range(len(dealt)), key=lambda i: len(dealt[i]))
        group = dealt[place]
        dealt[place : place + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
    rows: list[tuple[int | None, ...]] = [tuple(group) for group in dealt]
    rows += [(None,)] * (count - len(rows))
    plans = []
    for start in range(0, count, dp):
        mine = tuple(rows[start : start + dp])
        plans.append(_lengths(mine, lengths, multiple_of, packed))
    return plans


def _packed(p: MicrobatchPlan, lengths: Sequence[int], multiple_of: int) -> MicrobatchPlan:
    """The same sequences, end to end; rows of padding go where there is anything else."""
    rows = tuple(tuple(i for i in row if i is not None) or (None,) for row in p.rows)
    return _lengths(rows, lengths, multiple_of, packed=True)


def _lengths(
    rows: tuple[tuple[int | None, ...], ...],
    lengths: Sequence[int],
    multiple_of: int,
    packed: bool,
) -> MicrobatchPlan:
    combine = sum if packed else max
    sizes = (combine(1 if i is None else lengths[i] for i in row) for row in rows)
    return MicrobatchPlan(tuple(_round_up(size, multiple_of) for size in sizes), rows)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _round_up(value: int, multiple_of: int) -> int:
    return -(-value // multiple_of) * multiple_of
