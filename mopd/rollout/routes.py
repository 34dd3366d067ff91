"""Which experts each token of a rollout went to, recorded inside vLLM's worker.

On a GPU vLLM returns them itself (`enable_return_routed_experts`); its CPU runner does not, but
every router has a hook for it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from mopd.errors import ModelError


class RouteRecorder:
    """Collects the routers' choices of every step and sorts them by request and position."""

    def __init__(self, runner: Any) -> None:
        """`runner`: vLLM's model runner, whose `execute_model` is watched from now on.

        Raises ModelError where no router of the model can be listened to.
        """
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        self._runner = runner
        config = runner.model_config
        self._shape = (config.get_total_num_hidden_layers(), config.get_num_experts_per_tok())
        self._dtype = np.uint8 if config.get_num_experts() <= 256 else np.uint16
        self._step: dict[int, torch.Tensor] = {}
        self._pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
        for module in runner.get_model().modules():
            router = getattr(module, "router", None)
            if isinstance(router, BaseRouter) and hasattr(module, "layer_id"):
                router.set_capture_fn(partial(self._capture, module.layer_id))
                self._step[module.layer_id] = torch.empty(0)
        if not self._step:
            raise ModelError(
                "student.routing_replay: vLLM's model of this checkpoint has no router that can "
                "be recorded; set it to false"
            )
        self._execute = runner.execute_model
        runner.execute_model = self._watched

    def _capture(self, layer: int, topk_ids: torch.Tensor) -> None:
        self._step[layer] = topk_ids

    def _watched(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        self._step.clear()
        result = self._execute(scheduler_output, *arguments, **named)
        if self._step:
            self._sort(scheduler_output.num_scheduled_tokens)
        return result

    def _sort(self, scheduled: dict[str, int]) -> None:
        """The step's tokens lie request by request, in the order of the input batch."""
        total = sum(scheduled.values())
        routes = np.zeros((total, *self._shape), dtype=self._dtype)
        for layer, ids in self._step.items():
            routes[:, layer] = ids[:total].cpu().numpy()
        start = 0
        for name in self._runner.input_batch.req_ids:
            count = scheduled.get(name, 0)
            if count:
                first = self._runner.requests[name].num_computed_tokens
                # vLLM appends "-" and eight random characters to the caller's request id.
                pieces = self._pieces.setdefault(name.rpartition("-")[0], [])
                pieces.append((first, routes[start : start + count]))
                start += count
        assert start == total, (start, total)

    def pop(self, request_id: str, tokens: int) -> np.ndarray:
        """[tokens, layers, k] choices of a finished request's first tokens; forgotten here.

        Layers without experts are 0. Raises ModelError where a token was never computed.
        """
        routes = np.zeros((tokens, *self._shape), dtype=self._dtype)
        known = np.zeros(tokens, dtype=bool)
        for first, piece in self._pieces.pop(request_id, []):
            room = max(0, min(len(piece), tokens - first))
            routes[first : first + room] = piece[:room]
            known[first : first + room] = True
        if not known.all():
            raise ModelError(
                f"rollout {request_id}: no expert choices for {int((~known).sum())} of {tokens} "
                "tokens (student.routing_replay)"
            )
        return routes

    def forget(self) -> None:
        """Drop what nobody asked for (scoring, warm-up); call while no request is running."""
        self._pieces.clear()
