"""vLLM's dictionaries of logprobs become arrays, the sampled id first, whatever its rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mopd.rollout.engine import sampler_topk


@dataclass
class Entry:
    logprob: float


def test_the_sampled_id_comes_first_and_once() -> None:
    inside = {5: Entry(-1.0), 3: Entry(-0.5)}  # the sampled 5 is one of the top two
    outside = {9: Entry(-4.0), 3: Entry(-0.25), 5: Entry(-1.5)}
    topk = sampler_topk([5, 9], [inside, outside], 2)
    np.testing.assert_array_equal(topk.ids, [[5, 3, -1], [9, 3, 5]])
    np.testing.assert_allclose(topk.logprobs, [[-1.0, -0.5, 0.0], [-4.0, -0.25, -1.5]])
    assert topk.ids.dtype == np.int32 and topk.logprobs.dtype == np.float32
