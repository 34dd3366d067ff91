"""What runs inside vLLM's worker process: loading new weights in place.

Given to vLLM as ``worker_extension_cls``; its methods are reached by ``collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from safetensors import safe_open
from vllm.platforms import current_platform

from mopd.rollout.routes import RouteRecorder


def _repack_cpu_experts_after_update() -> None:
    """Make an in-place update of MoE weights take effect on the CPU.

    vLLM 0.32 prepacks the experts for its CPU grouped GEMM only the first time; on an update the
    new weights are copied beside the prepacked ones, which stay in use: output is wrong by nats
    and nothing says so. Running the experts' own post-processing again after an update mends it.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    if getattr(UnquantizedFusedMoEMethod, "_mopd_repacks", False):
        return
    original = UnquantizedFusedMoEMethod._setup_kernel

    def _setup_kernel(self, layer, w13, w2):  # type: ignore[no-untyped-def]
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = _setup_kernel
    UnquantizedFusedMoEMethod._mopd_repacks = True


if current_platform.is_cpu():
    _repack_cpu_experts_after_update()


class WorkerExtension:
    """Mixed into vLLM's worker."""

    def mopd_load_weights(self, path: str) -> int:
        """Load every tensor of a Hugging Face safetensors file in place; return how many.

        The file travels as a path because tensors cannot be sent to a worker process by
        ``collective_rpc``.
        """
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            self.model_runner.reload_weights(  # type: ignore[attr-defined]
                weights_iterator=((name, file.get_tensor(name)) for name in names)
            )
        return len(names)

    def mopd_record_routes(self) -> None:
        """From now on remember the experts that every token goes to."""
        self._mopd_routes = RouteRecorder(self.model_runner)  # type: ignore[attr-defined]

    def mopd_pop_routes(self, wanted: Sequence[tuple[str, int]]) -> list[np.ndarray]:
        """[tokens, layers, k] choices for each (request id, tokens), forgotten here."""
        return [self._mopd_routes.pop(name, tokens) for name, tokens in wanted]

    def mopd_forget_routes(self) -> None:
        """Drop the choices of requests that nobody asked about."""
        self._mopd_routes.forget()
