"""What of the student, its layout and its weight sync cannot be meant.

Reads at most the `config.json` of the student's folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mopd.config.model_files import ModelLimits, folder_problem, read_model_limits
from mopd.config.schema import DEVICE_TRANSPORTS, Config, StudentConfig
from mopd.errors import ModelError

NO_CONTEXT_PARALLEL = (
    "only 1 is implemented: splitting one sequence over ranks needs Transformer Engine's "
    "attention, and the loss would have to meet its parts again. Use tp (with it goes sequence "
    "parallelism), student.recompute or a smaller student.max_tokens_per_microbatch"
)


def check_weight_sync(config: Config) -> Iterator[str]:
    sync, rank_gpus = config.weight_sync, config.student.gpus_per_rank
    engine_gpus = config.rollout.gpus_per_engine
    if sync.transport in DEVICE_TRANSPORTS and not (rank_gpus > 0 and engine_gpus > 0):
        yield (
            f"weight_sync.transport {sync.transport} goes from GPU to GPU, but "
            f"student.gpus_per_rank is {rank_gpus:g} and rollout.gpus_per_engine {engine_gpus:g}; "
            "on a CPU take shared_memory (one machine) or file"
        )
    elif sync.transport == "nccl" and rank_gpus < 1:
        yield (
            f"weight_sync.transport nccl with student.gpus_per_rank {rank_gpus:g}: NCCL cannot "
            "join two processes on one GPU; take ipc, which is made for that, or whole GPUs"
        )
    elif sync.transport == "ipc" and not (rank_gpus < 1 and engine_gpus < 1):
        yield (
            "weight_sync.transport ipc: every engine must share the GPU of a rank, but "
            f"student.gpus_per_rank is {rank_gpus:g} and rollout.gpus_per_engine {engine_gpus:g}, "
            "which shares none; take fractions that fit together (0.5 and 0.5), or nccl"
        )
    if (sync.transport == "file") != (sync.directory is not None):
        yield (
            "weight_sync.transport file needs weight_sync.directory, a folder that all machines see"
            if sync.directory is None
            else f"weight_sync.directory ({sync.directory}) is of transport file; "
            f"{sync.transport} has no folder"
        )
    elif sync.directory is not None and not Path(sync.directory).is_dir():
        yield f"weight_sync.directory: {sync.directory} is no folder"


def check_student(config: Config) -> Iterator[str]:
    student, layout = config.student, config.student.parallel
    if student.freeze_routers and student.router_bias_update_rate > 0:
        yield (
            f"student.router_bias_update_rate is {student.router_bias_update_rate:g}, but "
            "student.freeze_routers holds the routers; set freeze_routers to false, or the rate to "
            "0"
        )
    limits: ModelLimits | None = None
    if problem := folder_problem(student.model):
        yield f"student.model: {problem}"
    else:
        try:
            limits = read_model_limits(student.model)
        except ModelError as error:
            yield f"student.model: {error}"
    if student.fp32_head and student.dtype == "float32":
        yield "student.fp32_head has no effect with student.dtype float32; leave one of the two out"
    if student.checkpoint_async and student.checkpoint_format != "megatron":
        yield (
            f"student.checkpoint_async with student.checkpoint_format {student.checkpoint_format}: "
            "whole tensors travel to rank 0 one after the other, straight into the file; to write "
            "them later rank 0 would need a second copy of the whole model and its moments. Take "
            "checkpoint_format megatron, where every rank copies what it writes"
        )
    if student.routing_replay and student.recompute == "layers" and layout.pp > 1:
        yield (
            "student.routing_replay with student.recompute layers and student.parallel.pp "
            f"{layout.pp}: by the time a layer is computed again another micro-batch's choices "
            "are in place; use recompute attention, or pp 1"
        )
    if student.routing_replay and limits is not None and limits.num_experts == 0:
        yield f"student.routing_replay: {student.model} has no experts to route to; set it to false"
    if not student.freeze_routers and limits is not None and limits.num_experts == 0:
        yield f"student.freeze_routers is false, but {student.model} has no routers; leave it out"
    if layout.cp > 1:
        yield f"student.parallel.cp is {layout.cp}; {NO_CONTEXT_PARALLEL}"
    tokens = student.max_tokens_per_microbatch
    if tokens is not None and student.micro_batch_size != StudentConfig.micro_batch_size:
        yield (
            f"student has both micro_batch_size {student.micro_batch_size} and "
            f"max_tokens_per_microbatch {tokens}; leave one of the two out"
        )
    if tokens is not None and tokens < config.rollout.max_response_tokens:
        yield (
            f"student.max_tokens_per_microbatch is {tokens}, less than one answer of "
            f"rollout.max_response_tokens {config.rollout.max_response_tokens}; a forward must "
            "hold the longest prompt and answer"
        )
    if min(layout.dp, layout.tp, layout.pp, layout.ep, layout.etp) < 1:
        return  # already said, with the ranges
    key = "student.parallel"
    if (layout.dp * layout.tp) % (layout.ep * layout.etp):
        yield (
            f"{key}: ep * etp = {layout.ep * layout.etp} must divide dp * tp = "
            f"{layout.dp * layout.tp}, the ranks of one pipeline stage over which experts spread"
        )
    if limits is None:
        return
    top_k = config.objective.teacher.top_k
    if top_k is not None and top_k >= limits.vocab_size:
        yield (
            f"objective.teacher.top_k {top_k} is not below the {limits.vocab_size} ids of "
            f"{student.model}"
        )
    where = f"of {student.model}"
    if limits.num_experts == 0 and (layout.ep > 1 or layout.etp > 1):
        yield f"{key}: ep {layout.ep}, etp {layout.etp}, but {student.model} has no experts"
    elif limits.num_experts % layout.ep:
        yield f"{key}.ep {layout.ep} does not divide the {limits.num_experts} experts {where}"
    if limits.num_heads % layout.tp:
        yield f"{key}.tp {layout.tp} does not divide the {limits.num_heads} heads {where}"
    if limits.num_kv_heads % layout.tp:
        yield f"{key}.tp {layout.tp} does not divide the {limits.num_kv_heads} KV heads {where}"
    if limits.num_layers % layout.pp:
        yield f"{key}.pp {layout.pp} does not divide the {limits.num_layers} layers {where}"
    if config.rollout.max_response_tokens >= limits.max_position_embeddings:
        yield (
            f"rollout.max_response_tokens {config.rollout.max_response_tokens} leaves no room for "
            f"a prompt in the context {where} ({limits.max_position_embeddings} tokens)"
        )
