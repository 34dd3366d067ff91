"""Logprobs gathered by blocks of rows, against a float64 log-softmax of everything."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mopd_teachers.gather import likeliest, scored


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_give_what_the_whole_gives(rows_at_a_time: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(7, 8).to(dtype), (4 * torch.randn(50, 8)).to(dtype)
    targets, candidates = torch.randint(50, (7,)), torch.randint(50, (7, 5))
    blocks: list[int] = []

    def logits(rows: torch.Tensor) -> torch.Tensor:
        blocks.append(len(rows))
        return rows @ head.T + 200.0  # far from 0: the shift by the maximum matters

    exact = logits(hidden).double().log_softmax(-1)
    blocks.clear()
    for top_k, given in ((0, None), (4, None), (0, candidates)):
        ids, values = scored(logits, hidden, targets, top_k, given, rows_at_a_time)
        assert torch.equal(ids[:, 0], targets) and values.dtype == torch.float32
        torch.testing.assert_close(values.double(), exact.gather(1, ids), atol=2e-5, rtol=0)
        if given is not None:
            assert torch.equal(ids[:, 1:], given)
        elif top_k:
            torch.testing.assert_close(
                values[:, 1:].double(), exact.topk(4).values, atol=2e-5, rtol=0
            )
    assert max(blocks) == min(rows_at_a_time, 7) and sum(blocks) == 3 * 7


@pytest.mark.parametrize("k", [1, 20, 259, 260])
def test_the_likeliest_are_those_of_torch(k: int) -> None:
    torch.manual_seed(1)
    logprobs = (9 * torch.randn(40, 260)).log_softmax(-1)
    logprobs[0, 7] = 0.0  # -0.0 and 0.0 are the same size
    logprobs[1] = -torch.inf
    logprobs[1, 3] = -0.0
    values, ids = likeliest(logprobs, k)
    assert torch.equal(values, logprobs.topk(k).values) and values.dtype == torch.float32
    assert torch.equal(values, logprobs.gather(1, ids))
    assert all(len(set(row)) == k for row in ids.tolist())
    # Of equal ones the lower id comes first.
    assert likeliest(torch.full((1, 9), -2.0), 4)[1].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("rounding", [None, 4.0, 1.0])
@pytest.mark.parametrize(("vocabulary", "k"), [(5003, 1), (5003, 20), (49_152, 64), (4099, 1024)])
def test_the_likeliest_of_large_vocabularies(vocabulary: int, k: int, rounding: float) -> None:
    """Also with many equal ones at the edge, as half precision makes them."""
    torch.manual_seed(2)
    logits = 3 * torch.randn(12, vocabulary)
    if rounding is not None:
        logits = (logits * rounding).round() / rounding
    logits[0] = 0.0
    logits[1, -1] = 50.0  # past the last whole group
    logprobs = logits.log_softmax(-1)
    values, ids = likeliest(logprobs, k)
    # A stable sort keeps equal ones in the order of their ids.
    want = logprobs.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, want.values[:, :k]) and torch.equal(ids, want.indices[:, :k])


MEASURE = """
import sys, torch
from mopd_teachers.gather import scored
rows, vocabulary, block = int(sys.argv[1]), 150_000, 16 << 20
torch.set_num_threads(1)
hidden, head = torch.randn(rows, 4), torch.randn(vocabulary, 4)
targets = torch.zeros(rows, dtype=torch.long)
for top_k in (0, 20):
    scored(lambda x: x @ head.T, hidden, targets, top_k, None, block // (4 * vocabulary))
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """The logits of 800 rows more would be 480 MB."""

    def peak_mb(rows: int) -> float:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(rows)], capture_output=True, text=True, check=True
        )
        return int(done.stdout) / 1024

    few, many = peak_mb(200), peak_mb(1000)
    assert many - few < 150, (few, many)
