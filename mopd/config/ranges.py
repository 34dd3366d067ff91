"""The range of every number and the names of every choice of a configuration. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mopd import objective_names
from mopd.config.objective import (
    BalanceConfig,
    ObjectiveConfig,
    OrmConfig,
    PolicyLossConfig,
    ReferenceKLConfig,
    ScheduleConfig,
    TeacherSignalConfig,
    TruncationConfig,
)
from mopd.config.schema import (
    DEVICE_TRANSPORTS,
    Config,
    DomainConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    FailuresConfig,
    OptimizerConfig,
    ParallelConfig,
    PromptsConfig,
    RayConfig,
    RolloutConfig,
    SamplingConfig,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
    VerifierConfig,
    WeightSyncConfig,
)
from mopd.config.wording import nearest


@dataclass(frozen=True)
class Range:
    """Bounds of a number; both included unless `above` (then the lower one is not)."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def problem(self, value: float) -> str | None:
        if not math.isfinite(value):
            return f"must be a finite number, got {value}"
        low_ok = value > self.low if self.above else value >= self.low
        high_ok = value < self.high if self.below else value <= self.high
        return None if low_ok and high_ok else f"must be {self}, got {value}"

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.low:g}"
        if math.isinf(self.high):
            return low
        return f"{low} and {'below' if self.below else 'at most'} {self.high:g}"


_POSITIVE = Range(0, above=True)
_COUNT = Range(1)
_NOT_NEGATIVE = Range(0)
_FRACTION = Range(0, 1)
_SEED = Range(0, 2**32 - 1)  # numpy takes no more

RANGES: dict[type, dict[str, Range]] = {
    Config: {"seed": _SEED},
    RayConfig: {"num_cpus": _COUNT},
    ParallelConfig: {
        "dp": _COUNT,
        "tp": _COUNT,
        "pp": _COUNT,
        "ep": _COUNT,
        "etp": _COUNT,
        "cp": _COUNT,
    },
    OptimizerConfig: {
        "lr": _POSITIVE,
        "min_lr": _NOT_NEGATIVE,
        "warmup_steps": _NOT_NEGATIVE,
        "beta1": Range(0, 1, below=True),
        "beta2": Range(0, 1, below=True),
        "eps": _POSITIVE,
        "weight_decay": _NOT_NEGATIVE,
        "clip_grad": _NOT_NEGATIVE,
    },
    StudentConfig: {
        "micro_batch_size": _COUNT,
        "max_tokens_per_microbatch": _COUNT,
        "router_bias_update_rate": _NOT_NEGATIVE,
        "threads_per_rank": _COUNT,
        "gpus_per_rank": _FRACTION,
    },
    RolloutConfig: {
        "engines": _COUNT,
        "temperature": _POSITIVE,
        "max_response_tokens": _COUNT,
        "max_num_seqs": _COUNT,
        "kv_cache_gib": _POSITIVE,
        "threads_per_engine": _COUNT,
        "gpus_per_engine": _NOT_NEGATIVE,
    },
    TeacherConfig: {
        "replicas": _COUNT,
        "tensor_parallel_size": _COUNT,
        "max_model_len": _COUNT,
        "kv_cache_gib": _POSITIVE,
        "threads": _COUNT,
        "gpus": _NOT_NEGATIVE,
        "concurrency": _COUNT,
        "timeout_s": _POSITIVE,
        "retries": _NOT_NEGATIVE,
        "hedge_after_s": _POSITIVE,
        "hedge_quantile": Range(0, 1, above=True, below=True),
        "cache_mib": _NOT_NEGATIVE,
        "start_timeout_s": _POSITIVE,
        "max_restarts": _NOT_NEGATIVE,
        "pause_s": _NOT_NEGATIVE,
    },
    PromptsConfig: {"size": _COUNT, "seed": _SEED, "fewshot": _NOT_NEGATIVE},
    VerifierConfig: {"timeout_s": _POSITIVE, "memory_gib": Range(0.5)},
    DomainConfig: {"held_out": _NOT_NEGATIVE, "alpha": _NOT_NEGATIVE, "weight": _NOT_NEGATIVE},
    ObjectiveConfig: {"constant_length": _POSITIVE},
    TeacherSignalConfig: {
        "weight": _NOT_NEGATIVE,
        "jsd_beta": _FRACTION,
        "top_k": _COUNT,
        "clip": _NOT_NEGATIVE,
    },
    OrmConfig: {
        "alpha": _NOT_NEGATIVE,
        "baseline": Range(-math.inf),
        "baseline_decay": Range(0, 1, below=True),
        "gae_gamma": _FRACTION,
        "gae_lambda": _FRACTION,
        "critic_lr": _POSITIVE,
        "all_wrong": Range(-math.inf, 0),
        "overlong_buffer": _COUNT,
    },
    ScheduleConfig: {
        "value": _NOT_NEGATIVE,
        "end_value": _NOT_NEGATIVE,
        "from_step": _NOT_NEGATIVE,
        "until_step": _COUNT,
    },
    PolicyLossConfig: {
        "clip_low": _FRACTION,
        "clip_high": _POSITIVE,
        "tau_positive": _POSITIVE,
        "tau_negative": _POSITIVE,
        "delta": _POSITIVE,
        "mu": _NOT_NEGATIVE,
    },
    TruncationConfig: {"low": _FRACTION, "high": Range(1)},
    ReferenceKLConfig: {"weight": _NOT_NEGATIVE},
    BalanceConfig: {"exponent": Range(0, 10), "low": _POSITIVE, "high": _POSITIVE},
    TrainConfig: {
        "steps": _COUNT,
        "prompts_per_step": _COUNT,
        "samples_per_prompt": _COUNT,
        "epochs": _COUNT,
        "minibatches": _COUNT,
        "checkpoint_every": _COUNT,
        "keep_checkpoints": _COUNT,
    },
    SamplingConfig: {
        "min_priority": Range(0, 1, above=True),
        "curriculum_start": Range(0, 1, above=True),
        "curriculum_steps": _COUNT,
        "retire_above": Range(0, 1, above=True),
        "retire_after": _COUNT,
        "dynamic_rounds": _NOT_NEGATIVE,
    },
    EvaluationConfig: {
        "every": _NOT_NEGATIVE,
        "bootstrap": _COUNT,
        "seed": _SEED,
        "samples": _NOT_NEGATIVE,
        "temperature": _POSITIVE,
        "patience": _NOT_NEGATIVE,
    },
    EvaluationSetConfig: {"items": _COUNT},
    FailuresConfig: {"max_masked_fraction": _FRACTION, "max_verifier_failures": _FRACTION},
    WeightSyncConfig: {"probe_sequences": _COUNT, "max_logprob_error": _POSITIVE},
}

VERIFIER_NAMES = ("exact_match", "lm_eval", "math_verify", "reasoning_gym")

NAMES: dict[type, dict[str, tuple[str, ...]]] = {
    OptimizerConfig: {"schedule": ("constant", "linear", "cosine")},
    StudentConfig: {
        "dtype": ("float32", "bfloat16"),
        "kernel": ("auto", "triton", "torch"),
        "loss_head": ("logits", "fused"),
        "recompute": ("none", "attention", "layers"),
        "checkpoint_format": ("huggingface", "megatron"),
    },
    RolloutConfig: {"source": ("student", "teachers")},
    WeightSyncConfig: {"transport": ("shared_memory", "file", *DEVICE_TRANSPORTS)},
    TeacherConfig: {"dtype": ("float32", "bfloat16", "float16", "auto")},
    ObjectiveConfig: {
        "denominator": objective_names.DENOMINATORS,
        "aggregation": objective_names.AGGREGATIONS,
    },
    TeacherSignalConfig: {
        "signal": objective_names.SIGNALS,
        "direction": objective_names.DIRECTIONS,
        "support": objective_names.SUPPORTS,
    },
    OrmConfig: {
        "estimator": objective_names.ESTIMATORS,
        "reward": ("correct", "score"),
        "zero_variance": ("keep", "drop"),
    },
    ScheduleConfig: {"kind": objective_names.SCHEDULES},
    PolicyLossConfig: {"name": tuple(objective_names.POLICY_LOSS_SPECS)},
    TruncationConfig: {
        "kind": tuple(objective_names.TRUNCATION_BOUNDS),
        "ratio": objective_names.RATIOS,
    },
    ReferenceKLConfig: {"kind": objective_names.REFERENCE_KLS},
    BalanceConfig: {"kind": objective_names.BALANCES},
    SamplingConfig: {"order": ("shuffle", "prioritised", "curriculum")},
    EvaluationConfig: {
        "keep_best": ("worst_headroom", "mean_headroom", "worst_retention", "off"),
    },
    VerifierConfig: {"name": VERIFIER_NAMES},
}


def check_values(node: Any, path: str) -> Iterator[str]:
    """Ranges and enumerations of every field below `node`."""
    ranges, names = RANGES.get(type(node), {}), NAMES.get(type(node), {})
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        key = f"{path}{field.name}"
        if value is None:
            continue
        if field.name in ranges:
            if problem := ranges[field.name].problem(value):
                yield f"{key} {problem}"
        elif field.name in names:
            if value not in names[field.name]:
                hint = nearest(value, names[field.name]).partition("; known")[0]
                yield f"{key}: {value!r} is not one of {', '.join(names[field.name])}{hint}"
        elif dataclasses.is_dataclass(value):
            yield from check_values(value, f"{key}.")
        elif isinstance(value, dict):
            for name, each in value.items():
                if dataclasses.is_dataclass(each):
                    yield from check_values(each, f"{key}.{name}.")
                else:
                    yield from _free(each, f"{key}.{name}")


def _free(value: Any, key: str) -> Iterator[str]:
    """Free values (parameters of tasks, verifiers, servers) need only be finite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{key} must be a finite number, got {value}"
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _free(each, f"{key}.{name}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _free(each, f"{key}.{index}")
