"""Counters of one teacher, for the run's metrics."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

_WINDOW = 512
_KNOWN = 20  # requests, before their latencies say anything of the next


class TeacherStats:
    """Totals since the start; latencies (seconds a request) over the last 512 requests."""

    def __init__(self) -> None:
        self.requests = 0
        self.retries = 0
        self.tokens = 0
        self.prefix_tokens = 0
        """Of prompts, that a server had in its prefix cache."""
        self.hedges = self.hedges_won = 0
        """Requests put to a second server, too; of which the second answered first."""
        self.busy = 0
        """Requests that a server had too much to do for (429), each asked again later."""
        self.cache_hits = 0
        self.failures: Counter[str] = Counter()
        self._latencies_s: deque[float] = deque(maxlen=_WINDOW)

    def request_done(self, seconds: float) -> None:
        self.requests += 1
        self._latencies_s.append(seconds)

    def latency_s(self, quantile: float) -> float:
        """Of the last 512 requests; 0 as long as fewer than 20 are known."""
        if len(self._latencies_s) < _KNOWN:
            return 0.0
        return _quantile(sorted(self._latencies_s), quantile)

    def snapshot(self) -> dict[str, float]:
        """Plain numbers: requests, retries, busy, tokens, prefix_tokens, hedges, hedges_won,
        cache_hits, failures, failures/CAUSE, latency_*_s."""
        ordered = sorted(self._latencies_s)
        return {
            "requests": float(self.requests),
            "retries": float(self.retries),
            "busy": float(self.busy),
            "tokens": float(self.tokens),
            "prefix_tokens": float(self.prefix_tokens),
            "hedges": float(self.hedges),
            "hedges_won": float(self.hedges_won),
            "cache_hits": float(self.cache_hits),
            "failures": float(sum(self.failures.values())),
            **{f"failures/{cause}": float(n) for cause, n in sorted(self.failures.items())},
            "latency_p50_s": _quantile(ordered, 0.50),
            "latency_p95_s": _quantile(ordered, 0.95),
        }


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
