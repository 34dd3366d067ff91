"""Adam over Megatron's gradient buffers: built, stepped, its state read and set."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.config.schema import OptimizerConfig
from mopd.errors import ModelError
from mopd.student import cpu_platform

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Piece:
    """What this rank's optimizer updates of one parameter: all of it, or with the distributed
    optimizer a range of its elements."""

    optimizer: Any
    """The torch optimizer."""
    main: Tensor
    """What it updates: the parameter itself, a float32 copy under bfloat16, or a part of those."""
    start: int
    stop: int

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of a tensor of the parameter's shape."""
        return whole.reshape(-1)[self.start : self.stop]


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
            use_distributed_optimizer=config.distributed,
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
        self._pieces = self._find_pieces()
        self.steps = 0
        """Updates made so far, which Adam's bias correction uses."""

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
            mains = (piece.main for piece in self._pieces.values())
            gradients = [main.grad for main in mains if main.grad is not None]
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        for group in self._megatron.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            # Norm weights decay by wd_mult 0; Megatron leaves applying it to its own scheduler.
            group["weight_decay"] = self._config.weight_decay * group.get("wd_mult", 1.0)
        self._megatron.step_with_ready_grads()
        self.steps += 1
        return norm

    # -- reading and setting its state, always whole parameters -------------------------------

    def trained(self) -> list[str]:
        """Megatron names of what is updated."""
        return list(self._parameters)

    def main_parameters(self) -> dict[str, Tensor]:
        """What is really updated, by Megatron name: float32 copies under bfloat16. Collective.

        With the distributed optimizer under bfloat16 these are copies, else the tensors
        themselves; `adopt_main` after they were written to.
        """
        out: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.dtype is torch.float32:
                out[name] = parameter
            elif self._config.distributed:
                out[name] = self._whole(name, lambda piece: piece.main)
            else:
                out[name] = self._pieces[name].main
        return out

    def adopt_main(self, main: Mapping[str, Tensor]) -> None:
        """After `main_parameters` were written to: bring optimizer and model in line."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if main[name] is parameter:
                    continue  # float32: the pieces are views of the parameter
                piece = self._pieces.get(name)
                if piece is not None and piece.main is not main[name]:
                    piece.main.copy_(piece.of(main[name]))
                parameter.copy_(main[name])

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients of the last backward, by Megatron name. Collective."""
        return {
            # The distributed optimizer sums each piece on its owner alone.
            name: self._whole(name, lambda piece, p=parameter: piece.of(p.main_grad))
            if self._config.distributed
            else parameter.main_grad
            for name, parameter in self._parameters.items()
        }

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Adam's moments, by moment and Megatron name; zeros before the first step. Collective."""
        return {moment: self.moment(moment) for moment in MOMENTS}

    def moment(self, moment: str) -> dict[str, Tensor]:
        """One of them: with the distributed optimizer each is gathered whole. Collective."""
        return {name: self._moment(name, moment) for name in self._parameters}

    def empty_moments(self) -> dict[str, dict[str, Tensor]]:
        """Zeros in the shape of `moments`."""
        return {
            moment: {
                name: torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
                for name, parameter in self._parameters.items()
            }
            for moment in MOMENTS
        }

    def restore(self, steps: int, moments: Mapping[str, MutableMapping[str, Tensor]]) -> None:
        """Set Adam's state to `steps` updates and `moments`, float32, which are taken over and out
        of the mappings: copies would have a resume need more memory than the training."""
        for name in self._parameters:
            whole = {moment: moments[moment].pop(name) for moment in MOMENTS}
            piece = self._pieces.get(name)
            if piece is None:
                continue
            state: dict[str, Any] = {}
            for moment, tensor in whole.items():
                part = piece.of(tensor)
                if part.numel() < tensor.numel():
                    part = part.clone()  # a view would keep all of it
                state[moment] = part.reshape(piece.main.shape)
            if _counts_per_parameter(piece.optimizer):
                state["step"] = torch.tensor(float(steps))
            piece.optimizer.state[piece.main] = state
        for optimizer in self._megatron_optimizers():
            if not _counts_per_parameter(optimizer.optimizer):
                for group in optimizer.optimizer.param_groups:
                    group["step"] = steps
        self.steps = steps

    def state_bytes(self) -> int:
        """Bytes of Adam's moments and of float32 copies on this rank."""
        total = 0
        for name, piece in self._pieces.items():
            state = piece.optimizer.state.get(piece.main) or {}
            total += sum(state[m].nbytes for m in MOMENTS if m in state)
            if piece.main.dtype != self._parameters[name].dtype:
                total += piece.main.nbytes
        return total

    def state_tensors(self) -> list[Tensor]:
        """What a step writes to on this rank, beside the parameters: moments and float32 copies."""
        found = [piece.main for piece in self._pieces.values()]
        for piece in self._pieces.values():
            state = piece.optimizer.state.get(piece.main) or {}
            found += [value for value in state.values() if isinstance(value, Tensor)]
        return found

    # -- pieces -------------------------------------------------------------------------------

    def _megatron_optimizers(self) -> list[Any]:
        chained = getattr(self._megatron, "chained_optimizers", [self._megatron])
        return [o for o in chained if o.optimizer is not None]

    def _find_pieces(self) -> dict[str, _Piece]:
        """This rank's piece of each parameter; none where another rank has all of it."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        pieces: dict[str, _Piece] = {}
        if self._config.distributed:
            for optimizer in self._megatron_optimizers():
                groups = optimizer.optimizer.param_groups
                for parameter, (group, place) in optimizer.model_param_group_index_map.items():
                    found = optimizer._get_model_param_range_map(parameter)["param"]
                    main = groups[group]["params"][place]
                    pieces[names[id(parameter)]] = _Piece(
                        optimizer.optimizer, main, found.start, found.end
                    )
            return pieces
        mains = {id(getattr(p, "main_param", p)): n for n, p in self._parameters.items()}
        for optimizer in self._megatron_optimizers():
            for group in optimizer.optimizer.param_groups:
                for main in group["params"]:
                    pieces[mains[id(main)]] = _Piece(optimizer.optimizer, main, 0, main.numel())
        assert pieces.keys() == self._parameters.keys()
        return pieces

    def _moment(self, name: str, moment: str) -> Tensor:
        def of(piece: _Piece) -> Tensor:
            state = piece.optimizer.state.get(piece.main) or {}
            return state[moment] if moment in state else torch.zeros_like(piece.main)

        return self._whole(name, of) if self._config.distributed else of(self._pieces[name])

    def _whole(self, name: str, of: Any) -> Tensor:
        """float32 tensor of the parameter's shape, put together from the ranks' pieces."""
        from megatron.core import parallel_state as ps

        parameter = self._parameters[name]
        expert = not getattr(parameter, "allreduce", True)
        group = ps.get_expert_data_parallel_group() if expert else ps.get_data_parallel_group()
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        piece = self._pieces.get(name)
        if piece is not None:
            whole[piece.start : piece.stop] = of(piece).detach().reshape(-1)
        dist.all_reduce(whole, group=group)  # every element is in exactly one piece
        return whole.view(parameter.shape)


def _counts_per_parameter(optimizer: Any) -> bool:
    """torch's Adam keeps the step count in each parameter's state, Transformer Engine's in the
    parameter group."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
