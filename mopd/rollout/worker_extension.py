"""What runs inside vLLM's worker process: loading new weights in place.

Given to vLLM as ``worker_extension_cls``; its methods are reached by ``collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.platforms import current_platform

from mopd.kernels.word_sums import word_sum, word_sums
from mopd.rollout.direct_load import DirectLoad, learn
from mopd.rollout.routes import RouteRecorder
from mopd.rollout.weight_file import WeightFile


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

    _mopd_file: WeightFile | None = None
    _mopd_direct: DirectLoad | None = None
    _mopd_use_direct = True

    def mopd_load_weights(self, path: str) -> dict[str, int]:
        """Load every tensor of a Hugging Face safetensors file in place.

        Returns tensor name -> sum of its words: as the model holds it where the file's places were
        learned, else as it was given to vLLM. The file travels as a path because tensors cannot be
        sent to a worker process by ``collective_rpc``.
        """
        file = self._mopd_open(path)
        direct = self._mopd_direct if self._mopd_use_direct else None
        if direct is not None and direct.knows(file):
            return direct.load(file)
        sums = word_sums(list(file.tensors.values()))
        self._mopd_reload(file.tensors.items())
        return dict(zip(file.tensors, sums, strict=True))

    def mopd_watch_loading(self) -> None:
        """Keep the fingerprints of the tensors that vLLM's weight transfer hands to the model."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        self._mopd_arrived: dict[str, Tensor] = {}
        if getattr(model.load_weights, "_mopd_watched", False):
            return
        load = model.load_weights

        def watched(weights: Iterable[tuple[str, Tensor]]) -> Any:
            def passing() -> Iterator[tuple[str, Tensor]]:
                for name, tensor in weights:
                    self._mopd_arrived[name] = word_sum(tensor)
                    yield name, tensor

            return load(passing())

        watched._mopd_watched = True  # type: ignore[attr-defined]
        model.load_weights = watched

    def mopd_arrived(self) -> dict[str, int]:
        """Tensor name -> sum of its words, of everything since `mopd_watch_loading`."""
        if not self._mopd_arrived:
            return {}
        sums = torch.stack(list(self._mopd_arrived.values())).tolist()
        return dict(zip(self._mopd_arrived, sums, strict=True))

    def mopd_learn_places(self, path: str) -> bool:
        """Learn where the file's weights belong, for `mopd_load_weights`; whether that was
        possible. The model must be given weights next, whatever the answer is."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if current_platform.is_cpu() and runner.model_config.quantization is None:
            file = self._mopd_open(path)
            self._mopd_direct = learn(runner.get_model(), file, self._mopd_reload)
        return self._mopd_direct is not None

    def mopd_set_direct(self, use: bool) -> None:
        """Whether `mopd_load_weights` uses the places that were learned, or vLLM's own way."""
        self._mopd_use_direct = use

    def _mopd_open(self, path: str) -> WeightFile:
        if self._mopd_file is None or not self._mopd_file.is_still(Path(path)):
            self._mopd_file = WeightFile(Path(path))
        return self._mopd_file

    def _mopd_reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.model_runner.reload_weights(weights_iterator=iter(tensors))  # type: ignore[attr-defined]

    def mopd_record_routes(self) -> None:
        """From now on remember the experts that every token goes to."""
        self._mopd_routes = RouteRecorder(self.model_runner)  # type: ignore[attr-defined]

    def mopd_pop_routes(self, wanted: Sequence[tuple[str, int]]) -> list[np.ndarray]:
        """[tokens, layers, k] choices for each (request id, tokens), forgotten here."""
        return [self._mopd_routes.pop(name, tokens) for name, tokens in wanted]

    def mopd_forget_routes(self) -> None:
        """Drop the choices of requests that nobody asked about."""
        self._mopd_routes.forget()
