"""Qwen3, dense: Llama with q/k norms."""

from __future__ import annotations

from typing import Any

from mopd.student.families.llama import Llama


class Qwen3(Llama):
    """`transformers` Qwen3ForCausalLM."""

    qk_norm = True

    def must_be(self) -> dict[str, Any]:
        return super().must_be() | {"use_sliding_window": False}
