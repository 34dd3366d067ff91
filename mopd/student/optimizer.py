"""Adam over Megatron's gradient buffers: built, stepped, its state read and set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mopd.config.schema import OptimizerConfig
from mopd.errors import ModelError
from mopd.student import cpu_platform

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Megatron's optimizers for the dense and the expert parameters of one rank."""

    def __init__(self, ddp: Any, config: OptimizerConfig, dtype: torch.dtype) -> None:
        from megatron.core.optimizer import OptimizerConfig as MegatronConfig
        from megatron.core.optimizer import get_megatron_optimizer

        self._config = config
        megatron = MegatronConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            use_distributed_optimizer=False,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
        )
        with cpu_platform.quiet_build(), cpu_platform.pretend_cuda():
            self._megatron = get_megatron_optimizer(megatron, [ddp], use_gloo_process_groups=False)
        self._parameters = {
            name: parameter
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad
        }

    def zero_grad(self) -> None:
        self._megatron.zero_grad()

    def step(self, lr: float, where: str) -> float:
        """Clip by the global norm and update; returns the norm before clipping.

        Raises ModelError, on every rank and with the weights untouched, when the norm is not
        finite; `where` says which step it was.
        """
        with cpu_platform.pretend_cuda():
            self._megatron.prepare_grads()
            norm = float(self._megatron.get_grad_norm())
        if not math.isfinite(norm):
            raise ModelError(
                f"{where}: the gradient norm is {norm}; the weights were not touched. Lower "
                "student.optimizer.lr, or look for extreme values in the step's samples."
            )
        limit = self._config.clip_grad
        if limit > 0 and norm > limit:
            # Not Megatron's own clipping: it asserts CUDA types, and this is all it does.
            gradients = [p.grad for p in self._main_parameters().values() if p.grad is not None]
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        for group in self._megatron.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            # Norm weights decay by wd_mult 0; Megatron leaves applying it to its own scheduler.
            group["weight_decay"] = self._config.weight_decay * group.get("wd_mult", 1.0)
        self._megatron.step_with_ready_grads()
        return norm

    def main_parameters(self) -> dict[str, Tensor]:
        """What the optimizer really updates, by Megatron name: float32 copies under bfloat16."""
        return dict(self._main_parameters())

    def _main_parameters(self) -> Mapping[str, Tensor]:
        return {n: getattr(p, "main_param", p) for n, p in self._parameters.items()}

    def copy_main_to_model(self) -> None:
        """After `main_parameters` were written to: bring the model's own weights in line."""
        with torch.no_grad():
            for name, main in self._main_parameters().items():
                if main is not self._parameters[name]:
                    self._parameters[name].copy_(main)

    def copy_model_to_main(self) -> None:
        """After the model's weights were written to: bring the optimizer's copies in line."""
        self._megatron.reload_model_params()

    @property
    def steps(self) -> int:
        """Updates made so far (Adam's own count, which its bias correction uses)."""
        for optimizer, parameter in self._holders():
            state = optimizer.state.get(parameter)
            if state and "step" in state:
                return int(state["step"])
        for group in self._megatron.param_groups:  # Transformer Engine's Adam counts per group
            if "step" in group:
                return int(group["step"])
        return 0

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Adam's moments, by moment and Megatron name; zeros before the first step."""
        out: dict[str, dict[str, Tensor]] = {moment: {} for moment in MOMENTS}
        holder = {id(p): optimizer for optimizer, p in self._holders()}
        for name, main in self._main_parameters().items():
            state = holder[id(main)].state.get(main) or {}
            for moment in MOMENTS:
                out[moment][name] = state.get(moment, torch.zeros_like(main))
        return out

    def restore(self, steps: int, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set Adam's state to `steps` updates and `moments` (copied)."""
        names = {id(main): name for name, main in self._main_parameters().items()}
        for optimizer, main in self._holders():
            optimizer.state[main] = {
                moment: moments[moment][names[id(main)]].clone() for moment in MOMENTS
            }
            if isinstance(optimizer, torch.optim.Optimizer) and _counts_per_parameter(optimizer):
                optimizer.state[main]["step"] = torch.tensor(float(steps))
        for optimizer in self._torch_optimizers():
            if not _counts_per_parameter(optimizer):
                for group in optimizer.param_groups:
                    group["step"] = steps

    def _torch_optimizers(self) -> list[Any]:
        chained = getattr(self._megatron, "chained_optimizers", [self._megatron])
        return [o.optimizer for o in chained if o.optimizer is not None]

    def _holders(self) -> Iterator[tuple[Any, Tensor]]:
        """(torch optimizer, parameter it updates) of this rank."""
        for optimizer in self._torch_optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, parameter


def _counts_per_parameter(optimizer: Any) -> bool:
    """torch's Adam keeps the step count in each parameter's state, Transformer Engine's in the
    parameter group."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
