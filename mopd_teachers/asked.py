"""What a scoring request asks for, as it travels in vLLM's sampling parameters."""

from __future__ import annotations

from typing import Any

EXTRA = "mopd"
"""Key of `SamplingParams.extra_args`; its value has ``first`` (P - 1, the row that predicts the
first response token), ``top_k``, ``width`` (K) and ``candidates`` (bytes, see `wire`)."""


def asked_of(params: Any) -> dict[str, Any] | None:
    """What a request of ours asks for; None for any other request."""
    extra = None if params is None else params.extra_args
    asked = None if not extra else extra.get(EXTRA)
    return asked if isinstance(asked, dict) else None  # a client's `vllm_xargs` may use the word
