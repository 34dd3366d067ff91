"""What vLLM is told when an engine starts: its environment and its arguments, by device.

What it may be told, and what that costs, changes with its version; written against vLLM 0.32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mopd.config.schema import RolloutConfig

_GIB = 2**30
_CPU_BLOCK_TOKENS = 128
"""Of vLLM's KV cache on the CPU, unless told otherwise."""


def engine_environment(threads: int, *, gpu: bool) -> dict[str, str]:
    """Environment variables a process needs *before* it imports vLLM."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if not gpu:
        # One process per engine: each further one imports everything again, and threads that
        # share the cores with the trainer make both an order of magnitude slower.
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Even in eager mode vLLM compiles small helpers at the first batch: seconds of
            # compiling for microseconds of gain.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return env


def engine_arguments(
    model: Path,
    config: RolloutConfig,
    *,
    dtype: str,
    max_model_len: int,
    seed: int,
    record_routes: bool,
    fp32_head: bool,
    transfer: str | None,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; what each of ours means is said at `RolloutEngine`."""
    gpu = config.gpus_per_engine > 0
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": not gpu,
        "seed": seed,
        # mu must be the logprob of the distribution that was sampled: temperature included.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # a request's own top_k is the bound
        "worker_extension_cls": "mopd.rollout.worker_extension.WorkerExtension",
        "disable_log_stats": True,
    }
    if not gpu or config.kv_cache_gib > 0:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * _GIB)
    if not gpu:
        arguments |= cpu_arguments(max_model_len, config.max_response_tokens)
    if record_routes and gpu:
        arguments["enable_return_routed_experts"] = True
    elif record_routes:
        # A prefix from the cache is not computed, and so not routed, again.
        arguments["enable_prefix_caching"] = False
    if fp32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if transfer:
        arguments["weight_transfer_config"] = {"backend": transfer}
    return arguments


def cpu_arguments(max_model_len: int, max_response_tokens: int) -> dict[str, Any]:
    """vLLM's arguments for an engine on the CPU; lengths in tokens."""
    from mopd.rollout import cpu_norms

    cpu_norms.register()
    arguments: dict[str, Any] = {
        # With seeds of their own, vLLM 0.32 winds a request's generator back after a prefill in
        # pieces, which a CPU generator cannot do; whole prefills need no winding back.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, 4096),
        "ir_op_priority": cpu_norms.PRIORITY,
    }
    if max_model_len - max_response_tokens < _CPU_BLOCK_TOKENS:
        # No prompt fills a block, and only whole blocks are found again: keeping the books of
        # them is 5% of a step.
        arguments["enable_prefix_caching"] = False
    return arguments
