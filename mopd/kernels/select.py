"""The way in to the kernels: what the trainer calls, each by the backend asked for."""

from __future__ import annotations

from mopd.kernels.backends import BackendName, choose_backend
from mopd.kernels.buckets import BucketLogprobs, bucket_logprobs, topk_logprobs
from mopd.kernels.full_divergence import full_divergence
from mopd.kernels.fused_head import fused_head_logprobs, fused_head_scores
from mopd.kernels.gathered import RowScores, gathered_logprobs, gathered_scores
from mopd.kernels.head import Head
from mopd.kernels.topk_divergence import bucket_divergence, topk_divergence

__all__ = [
    "BackendName",
    "BucketLogprobs",
    "Head",
    "RowScores",
    "bucket_divergence",
    "bucket_logprobs",
    "choose_backend",
    "full_divergence",
    "fused_head_logprobs",
    "fused_head_scores",
    "gathered_logprobs",
    "gathered_scores",
    "topk_divergence",
    "topk_logprobs",
]
