"""The way in to the kernels: what the trainer calls, each by the backend asked for."""

from __future__ import annotations

from mopd.kernels.backends import BackendName, choose_backend
from mopd.kernels.gathered import RowScores, gathered_logprobs, gathered_scores

__all__ = [
    "BackendName",
    "RowScores",
    "choose_backend",
    "gathered_logprobs",
    "gathered_scores",
]
