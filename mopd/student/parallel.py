"""Process groups: which ranks share what. Torch and Megatron keep them as process globals."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mopd.config.schema import ParallelConfig
from mopd.config.student_checks import NO_CONTEXT_PARALLEL
from mopd.errors import ConfigError, ModelError
from mopd.student import cpu_platform
from mopd.student.families.base import Family
from mopd.student.model import use_transformer_engine

RENDEZVOUS_TIMEOUT_S = 600.0


def check_layout(
    parallel: ParallelConfig,
    family: Family,
    world_size: int,
    *,
    transformer_engine: bool | None = None,
) -> None:
    """Raise ConfigError when the model cannot be spread as `student.parallel` says.

    transformer_engine: whether the ranks' layers are its own; None: as this process has them.
    """
    fused = use_transformer_engine() if transformer_engine is None else transformer_engine
    p, kwargs = parallel, family.transformer_kwargs()
    if "kv_lora_rank" in kwargs:  # one projection makes both
        kwargs["latent_width"] = kwargs["kv_lora_rank"] + kwargs["qk_pos_emb_head_dim"]

    def refuse(text: str) -> None:
        raise ConfigError(f"student.parallel: {text} (model: {family.where})")

    if p.cp > 1:
        refuse(f"cp is {p.cp}; {NO_CONTEXT_PARALLEL}.")
    for name in ("dp", "tp", "pp", "ep", "etp"):
        if getattr(p, name) < 1:
            refuse(f"{name} is {getattr(p, name)}; expected at least 1.")
    if p.dp * p.tp * p.pp != world_size:
        refuse(
            f"dp {p.dp} x tp {p.tp} x pp {p.pp} = {p.dp * p.tp * p.pp} ranks, but {world_size} "
            "were started. Make them equal."
        )
    if (p.dp * p.tp) % (p.ep * p.etp):
        refuse(
            f"ep {p.ep} x etp {p.etp} = {p.ep * p.etp} must divide dp x tp = {p.dp * p.tp}: "
            "experts are spread over the ranks of one pipeline stage."
        )
    if p.tp > 1 and kwargs.get("multi_latent_attention") and not fused:
        # Megatron's local layers share the rotary part of the keys between the ranks' heads and do
        # not sum its gradient over them: wrong gradients, silently.
        refuse(
            f"tp is {p.tp}; latent attention is split over ranks with Transformer Engine only. "
            "Use dp, ep and pp."
        )
    experts = kwargs.get("num_moe_experts")
    if experts is None and p.ep * p.etp > 1:
        refuse(f"ep {p.ep} and etp {p.etp} need a model with experts; set both to 1.")
    for key, size, what in (
        ("num_attention_heads", p.tp, "tp"),
        ("num_query_groups", p.tp, "tp"),
        ("ffn_hidden_size", p.tp, "tp"),
        ("num_layers", p.pp, "pp"),
        ("num_moe_experts", p.ep, "ep"),
        ("moe_ffn_hidden_size", p.etp, "etp"),
        ("moe_shared_expert_intermediate_size", p.tp, "tp"),
        ("q_lora_rank", p.tp, "tp"),
        ("latent_width", p.tp, "tp"),
    ):
        value = kwargs.get(key)
        if value is not None and value % size:
            refuse(f"{what} {size} does not divide the model's {key} {value}. Choose a divisor.")


def start(
    parallel: ParallelConfig,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    seed: int,
) -> set[dist.ProcessGroup]:
    """Join the process group and lay out Megatron's; returns the groups that were there before.

    A default process group that already exists is used as it is if its size and rank fit.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    before = _groups()
    if not dist.is_initialized():
        if not cpu_platform.on_cpu():
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            "gloo" if cpu_platform.on_cpu() else "nccl",
            init_method=f"tcp://{master_addr}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        )
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    ps.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        create_gloo_process_groups=False,
    )
    # Without CUDA there is no CUDA generator to track: the inference tracker's forks do nothing.
    # All dropout rates are 0, so no step draws random numbers in any case.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=cpu_platform.on_cpu())
    torch.manual_seed(seed)
    return before


def stop(before: set[dist.ProcessGroup]) -> None:
    """Undo `start`, whose answer is wanted."""
    from megatron.core import parallel_state as ps

    ps.destroy_model_parallel()
    if not before:
        dist.destroy_process_group()
        return
    for group in _groups() - before:  # Megatron forgets them; their sockets would stay open
        dist.destroy_process_group(group)


def _groups() -> set[dist.ProcessGroup]:
    """This process's groups, the default one included; torch has no public list of them."""
    return set(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else set()


def layout() -> dict[str, int]:
    """How the ranks are laid out now: equal where each rank has the part it had."""
    from megatron.core import parallel_state as ps

    return {
        "dp": ps.get_data_parallel_world_size(),
        "tp": ps.get_tensor_model_parallel_world_size(),
        "pp": ps.get_pipeline_model_parallel_world_size(),
        "ep": ps.get_expert_model_parallel_world_size(),
        "etp": ps.get_expert_tensor_parallel_world_size(),
    }


def device() -> torch.device:
    """Where this rank's tensors live."""
    return (
        torch.device("cpu")
        if cpu_platform.on_cpu()
        else torch.device("cuda", torch.cuda.current_device())
    )


def on_rank_zero(write: Callable[[], Any], what_failed: str) -> Any:
    """Do it on rank 0; its answer (small, picklable) reaches every rank.

    An OSError of rank 0 becomes a ModelError on every rank, so that none waits for the others.
    """
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = write()
        except OSError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise ModelError(f"{what_failed}: {box[1]}.")
    return box[0]
