"""The fingerprint of weights: parts add up, and every bit counts."""

from __future__ import annotations

import pytest
import torch

from mopd.kernels.word_sums import word_sum, word_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_it_is_the_sum_of_the_words(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    plain = sum(tensor.view(words).flatten().tolist())
    assert (word_sum(tensor).item() - plain) % 2**64 == 0
    assert word_sum(tensor).dtype is torch.int64


def test_parts_add_up_whatever_way_a_tensor_is_cut() -> None:
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for dim in (0, 1):  # the second cut makes parts that do not lie in one piece
        assert sum(word_sums(list(tensor.chunk(2, dim)))) == word_sum(tensor).item()
    assert word_sums([]) == []


def test_one_wrong_bit_shows() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    before = word_sum(tensor)
    tensor.view(torch.int32)[317] ^= 1
    assert word_sum(tensor) != before
    assert word_sum(torch.tensor([0.0])) != word_sum(torch.tensor([-0.0]))
    assert word_sum(torch.tensor([torch.nan])) == word_sum(torch.tensor([torch.nan]))
