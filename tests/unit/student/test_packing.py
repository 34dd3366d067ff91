"""Shards and whole tensors, both ways, against packings written out by hand."""

from __future__ import annotations

import pytest
import torch

from mopd.student.packing import Along, GateUp, GroupedQKV, Packing, VocabularyRows, Whole


def full(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("packing", "tensors"),
    [
        (Along(0), full((8, 3))),
        (Along(1), full((3, 8))),
        (VocabularyRows(8), full((8, 3))),
        (VocabularyRows(7), full((7, 3))),
        (VocabularyRows(5), full((5, 3))),  # over 4: one rank holds padding alone
        (GroupedQKV(4, 3, 2), full((24, 5), (8, 5), (8, 5))),
        (GateUp(), full((8, 3), (8, 3))),
    ],
)
def test_join_undoes_shard(packing: Packing, tensors: list[torch.Tensor], size: int) -> None:
    shards = [packing.shard(tensors, rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1
    joined = packing.join(shards)
    assert len(joined) == len(tensors)
    assert all(a.equal(b) for a, b in zip(joined, tensors, strict=True))

    written = [torch.full_like(t, torch.nan) for t in tensors]
    for rank, shard in enumerate(shards):
        for own, part in packing.pairs(shard, written, rank, size):
            assert own.shape == part.shape
            part.copy_(own)  # views: this writes into the whole tensors
    assert all(a.equal(b) for a, b in zip(written, tensors, strict=True))


def test_whole_is_not_split() -> None:
    (tensor,) = full((4,))
    assert not Whole().split and Along(0).split
    assert Whole().shard([tensor], 1, 2).equal(tensor)
    assert Whole().join([tensor])[0].equal(tensor)
    assert Whole().pairs(tensor, [tensor], 1, 2) == [(tensor, tensor)]


def test_vocabulary_padding_is_zero() -> None:
    (tensor,) = full((3, 2))
    last = VocabularyRows(3).shard([tensor], 1, 2)
    assert last[0].equal(tensor[2]) and last[1].eq(0).all()


def test_qkv_keeps_a_group_together() -> None:
    """Two groups of two queries, head size 1: rank 1 holds the second group's q, q, k, v."""
    q, k, v = (
        torch.tensor([[0.0], [1], [2], [3]]),
        torch.tensor([[10.0], [11]]),
        torch.tensor([[20.0], [21]]),
    )
    shard = GroupedQKV(2, 2, 1).shard([q, k, v], 1, 2)
    assert shard.flatten().tolist() == [2, 3, 11, 21]


def test_gate_up_halves_per_rank() -> None:
    gate, up = torch.tensor([[0.0], [1]]), torch.tensor([[10.0], [11]])
    assert GateUp().shard([gate, up], 1, 2).flatten().tolist() == [1, 11]
