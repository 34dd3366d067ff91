"""Several sampled answers an item: mean@n and the unbiased pass@k, with intervals over items."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mopd.errors import ConfigError
from mopd.evaluation.metrics import interval, paired_bootstrap


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` answers drawn from the `n` is right (Chen et al. 2021).

    1 - C(n - correct, k) / C(n, k): unbiased for 1 - (1 - p)^k, which 1 - (1 - correct/n)^k is not.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"need 0 <= correct <= n and 1 <= k <= n, got n={n} {correct=} {k=}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def sampled_entry(
    verdicts: Mapping[str, Sequence[bool | None]],
    ks: Sequence[int],
    *,
    replicates: int,
    seed: int,
) -> dict[str, Any]:
    """What one model's samples of one set say.

    Args:
        verdicts: item id -> right or wrong of each of its samples; None where it was not judged.
        ks: of pass@k.

    Returns:
        ``n_items``; ``n_samples`` asked for an item; ``mean`` (mean@n) and ``pass`` (k as text ->
        pass@k), each ``{"value", "ci95"}``. Items without a judged sample are left out; an item
        with fewer than k judged ones is left out of pass@k (``n_items`` there says how many stay).

    Raises:
        ConfigError: a k is larger than the number of samples.
    """
    asked = max((len(v) for v in verdicts.values()), default=0)
    if ks and max(ks) > asked:
        raise ConfigError(
            f"evaluation.pass_at has {max(ks)}, but only {asked} samples an item were drawn: "
            "raise evaluation.samples, or lower it"
        )
    judged = {item: [bool(v) for v in votes if v is not None] for item, votes in verdicts.items()}
    judged = {item: votes for item, votes in sorted(judged.items()) if votes}

    def entry(values: Sequence[float]) -> dict[str, Any]:
        if not values:
            return {"value": None, "ci95": [None, None], "n_items": 0}
        means = paired_bootstrap(np.array(values)[:, None], replicates=replicates, seed=seed)
        value = math.fsum(values) / len(values)
        return {"value": value, "ci95": interval(means[:, 0]), "n_items": len(values)}

    return {
        "n_items": len(judged),
        "n_samples": asked,
        "mean": entry([sum(v) / len(v) for v in judged.values()]),
        "pass": {
            str(k): entry([pass_at_k(len(v), sum(v), k) for v in judged.values() if len(v) >= k])
            for k in ks
        },
    }
