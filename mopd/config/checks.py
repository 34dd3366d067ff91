"""Ranges, names and contradictions of a loaded configuration, all problems at once.

Reads at most the `config.json` of model folders; imports no torch, vllm or ray. What needs the
prompts themselves (lengths, leaks, verifiers) is checked by `mopd.data`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mopd import objective_names
from mopd.config.model_files import (
    ModelLimits,
    folder_problem,
    hub_cache_folder,
    is_hub_name,
    read_model_limits,
)
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
from mopd.config.objective_checks import check_objective, objective_warnings
from mopd.config.placement import placement_text, total_reserved
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
from mopd.config.teachers import asked_teachers, mixture_problems
from mopd.config.wording import listed, nearest
from mopd.errors import ConfigError, ModelError


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

NO_CONTEXT_PARALLEL = (
    "only 1 is implemented: splitting one sequence over ranks needs Transformer Engine's "
    "attention, and the loss would have to meet its parts again. Use tp (with it goes sequence "
    "parallelism), student.recompute or a smaller student.max_tokens_per_microbatch"
)

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

_NAME = re.compile(r"\w[\w.-]*$")
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")
_STARTED_ONLY = (
    "revision dtype replicas tensor_parallel_size kv_cache_gib threads gpus max_restarts "
    "engine_args"
).split()
_TASK_ONLY = "params size seed template key_fields unordered_key".split()
_HARNESS_ONLY = ("lm_eval_folder", "fewshot")
_OWN_ENGINE_ARGS = {
    "model": "model",
    "revision": "revision",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "max_model_len": "max_model_len",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "api_key": "api_key_env",
}
_SERVER_ARGS = ("host", "port", "served_model_name", "uds")


def require_valid(config: Config) -> None:
    """Raise one ConfigError that lists every problem of `check_config`."""
    if problems := check_config(config):
        raise ConfigError(listed("the configuration cannot run", problems))


def check_config(config: Config) -> list[str]:
    """Every problem that can be seen without loading anything; empty when there is none."""
    return [
        *_values(config, ""),
        *_run(config),
        *_teachers(config),
        *_domains(config),
        *check_objective(config),
        *_student(config),
        *_weight_sync(config),
        *_evaluation(config),
        *_teachers_answers(config),
    ]


def config_warnings(config: Config) -> list[str]:
    """What will run but is probably not meant."""
    found = []
    used = asked_teachers(config) | {domain.teacher for domain in config.domains.values()}
    used.add(config.objective.kl.reference or "")
    for name in config.teachers:
        if name not in used:
            found.append(f"teachers.{name}: no domain names it, so it will not be started")
    for name, teacher in config.teachers.items():
        if teacher.hedge_after_s is not None and max(teacher.replicas, len(teacher.endpoints)) < 2:
            found.append(
                f"teachers.{name}.hedge_after_s: it has one server, so that no request can be put "
                "to a second one unless the run is given more (mopd teachers add)"
            )
        if teacher.tensor_parallel_size > 1 and teacher.gpus == 0:
            found.append(
                f"teachers.{name}: tensor_parallel_size is {teacher.tensor_parallel_size} with "
                "gpus 0: on a machine with GPUs its server takes some that nobody reserved; there "
                "set gpus to the same number"
            )
    drawn = [name for name, domain in config.domains.items() if domain.weight > 0]
    if 0 < config.train.prompts_per_step < len(drawn):
        found.append(
            f"train.prompts_per_step is {config.train.prompts_per_step} for {len(drawn)} domains: "
            "most steps will have no prompt of some of them"
        )
    for name, domain in config.domains.items():
        if domain.weight == 0:
            found.append(f"domains.{name}.weight is 0: it is evaluated, never trained on")
        if domain.held_out == 0 and domain.prompts.held_out_jsonl is None:
            found.append(f"domains.{name}.held_out is 0: nothing of it can be evaluated")
        if domain.verifier is None:
            found.append(f"domains.{name} has no verifier: it has no reward and no score")
    if config.ray.address is not None and config.weight_sync.transport == "shared_memory":
        found.append(
            "weight_sync.transport is shared_memory on a cluster (ray.address): every rank and "
            "engine must be on one machine; else take file, or nccl"
        )
    if config.student.dtype == "bfloat16" and config.weight_sync.max_logprob_error < 1e-2:
        found.append(
            f"weight_sync.max_logprob_error is {config.weight_sync.max_logprob_error:g} nats: "
            "bfloat16 engines differ by more than that from the trainer"
        )
    return [*found, *objective_warnings(config)]


def _values(node: Any, path: str) -> Iterator[str]:
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
            yield from _values(value, f"{key}.")
        elif isinstance(value, dict):
            for name, each in value.items():
                if dataclasses.is_dataclass(each):
                    yield from _values(each, f"{key}.{name}.")
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


def _run(config: Config) -> Iterator[str]:
    if config.ray.address is not None and config.ray.num_cpus is not None:
        yield (
            f"ray.num_cpus ({config.ray.num_cpus}) has no effect on a cluster that already runs "
            f"(ray.address {config.ray.address!r}); leave one of the two out"
        )
    asked, _ = total_reserved(config)
    if config.ray.num_cpus is not None and config.ray.num_cpus < asked:
        yield (
            f"ray.num_cpus is {config.ray.num_cpus}, but the run's processes reserve {asked:g}: "
            f"{placement_text(config)}; raise it, or leave it out: they may share cores"
        )
    if not _NAME.match(config.name):
        yield f"name {config.name!r} names a folder: letters, digits, '_', '-' and '.' only"
    if not config.run_dir.strip():
        yield "run_dir is empty"
    elif Path(config.run_dir).is_file():
        yield f"run_dir {config.run_dir!r} is a file, expected a folder"
    optimizer, train = config.student.optimizer, config.train
    if optimizer.warmup_steps > train.steps:
        yield (
            f"student.optimizer.warmup_steps is {optimizer.warmup_steps}, more than train.steps "
            f"({train.steps}): the learning rate would never be reached"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"student.optimizer.min_lr ({optimizer.min_lr:g}) is above lr ({optimizer.lr:g})"


def _teachers(config: Config) -> Iterator[str]:
    yield from _names(config.teachers, "teachers", "teacher")
    defaults = TeacherConfig()
    for name, teacher in config.teachers.items():
        key = f"teachers.{name}"
        if teacher.mixture:
            yield from mixture_problems(config, name)
            continue
        if name == "self" and (teacher.endpoints or teacher.model != config.student.model):
            got = teacher.endpoints or teacher.model
            yield (
                f"{key} is the frozen student: its model is student.model "
                f"({config.student.model}), got {got}; leave model out, or take another name"
            )
        if not teacher.endpoints:
            if not teacher.model:
                yield (
                    f"{key} has neither model (a checkpoint to serve) nor endpoints "
                    "(URLs of vLLM servers already running)"
                )
            elif problem := _model_problem(teacher.model, teacher.revision):
                yield f"{key}.model: {problem}"
            else:
                yield from _server_size(teacher, key)
        else:
            for field in _STARTED_ONLY:
                if getattr(teacher, field) != getattr(defaults, field):
                    yield (
                        f"{key}.{field} would have no effect: its servers (endpoints) already "
                        "run; leave one of the two out"
                    )
            for url in teacher.endpoints:
                if problem := _url_problem(url):
                    yield f"{key}.endpoints: {url!r} {problem}"
            bare = [url.rstrip("/") for url in teacher.endpoints]
            for url in sorted({url for url in bare if bare.count(url) > 1}):
                yield f"{key}.endpoints: {url} is listed twice"
        if teacher.hedge_after_s is not None and teacher.hedge_after_s >= teacher.timeout_s:
            yield (
                f"{key}.hedge_after_s ({teacher.hedge_after_s:g}) is not below timeout_s "
                f"({teacher.timeout_s:g}): the request would have ended before a second server "
                "is asked"
            )
        if teacher.api_key_env and not os.environ.get(teacher.api_key_env):
            yield (
                f"{key}.api_key_env: the environment variable {teacher.api_key_env!r} is not set; "
                "expected the bearer token of the teacher's servers in it"
            )
        for arg in teacher.engine_args:
            plain = arg.lstrip("-").replace("-", "_")
            if plain in _OWN_ENGINE_ARGS:
                yield f"{key}.engine_args.{arg}: use {key}.{_OWN_ENGINE_ARGS[plain]} for that"
            elif plain in _SERVER_ARGS:
                yield f"{key}.engine_args.{arg}: chosen by mopd for each server; leave it out"


def _server_size(teacher: TeacherConfig, key: str) -> Iterator[str]:
    """What a server started for this teacher could not be."""
    assert teacher.model is not None
    folder = Path(teacher.model)
    if not folder.is_dir():
        cached = hub_cache_folder(teacher.model, teacher.revision)
        assert cached is not None  # `_model_problem` has said so
        folder = cached
    size, length = teacher.tensor_parallel_size, teacher.max_model_len
    if 0 < teacher.gpus < size:
        yield (
            f"{key}.tensor_parallel_size is {size}, more than {key}.gpus ({teacher.gpus:g}): a "
            "server spreads over that many GPUs; set gpus to the same number"
        )
    try:
        limits = read_model_limits(folder)
    except ModelError as error:
        yield f"{key}.model: {error}"
        return
    if length is not None and length > limits.max_position_embeddings and not limits.stretched:
        yield (
            f"{key}.max_model_len is {length}, more than {teacher.model} can read "
            f"({limits.max_position_embeddings} tokens, max_position_embeddings)"
        )
    if size > 0 and limits.num_heads % size:
        yield (
            f"{key}.tensor_parallel_size {size} does not divide the {limits.num_heads} heads of "
            f"{teacher.model}"
        )


def _model_problem(model: str, revision: str | None) -> str | None:
    if not is_hub_name(model):
        problem = folder_problem(model)
        if problem is None and revision is not None:
            return f"{model} is a folder, which has no revision ({revision!r}); leave it out"
        return problem
    cached = hub_cache_folder(model, revision)
    if cached is not None:
        return folder_problem(cached)
    at = "" if revision is None else f" --revision {revision}"
    return (
        f"{model!r} is no folder here (working directory {Path.cwd()}) and not in the Hugging Face "
        f"cache{' in that revision' if at else ''}, and a run fetches nothing by itself; fetch it "
        f"first: hf download {model}{at}"
    )


def _url_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError as error:
        return f"is not a URL ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok:
        return "is not a URL such as http://10.0.0.7:8000"
    if url != url.strip() or parts.query or parts.fragment:
        return "should end after host, port and path"
    return None


def _domains(config: Config) -> Iterator[str]:
    if not config.domains:
        yield "no domains: nothing to train on"
    elif not any(domain.weight > 0 for domain in config.domains.values()):
        yield "every domain has weight 0: nothing to train on"
    yield from _names(config.domains, "domains", "domain")
    for name, domain in config.domains.items():
        key = f"domains.{name}"
        if domain.teacher not in config.teachers:
            hint = nearest(domain.teacher, config.teachers) or "; no teachers are given"
            if domain.teacher.strip()[:1] in ("[", "{") or "," in domain.teacher:
                hint = "; a domain has exactly one teacher, by name"
            yield f"{key}.teacher: there is no teacher {domain.teacher!r}{hint}"
        yield from _prompts(domain, key)
        yield from _verifier(domain, key)


def _prompts(domain: DomainConfig, key: str) -> Iterator[str]:
    prompts, defaults = domain.prompts, PromptsConfig()
    given = [name for name in ("jsonl", "task", "lm_eval") if getattr(prompts, name) is not None]
    if len(given) > 1:
        both = "both " if len(given) == 2 else ""
        yield f"{key}.prompts has {both}{' and '.join(given)}: set all but one of them to null"
        return
    if not given:
        yield f"{key}.prompts needs jsonl (a file) or task (a reasoning-gym task)"
        return
    if prompts.lm_eval is not None:
        yield from _harness_prompts(domain, key)
        return
    for field in _HARNESS_ONLY:
        if getattr(prompts, field) != getattr(defaults, field):
            yield f"{key}.prompts.{field} goes with lm_eval and has no effect without it"
    if prompts.task is not None:
        if prompts.held_out_jsonl is not None:
            yield f"{key}.prompts.held_out_jsonl goes with jsonl, not with task"
        if domain.held_out >= prompts.size:
            yield (
                f"{key}.held_out ({domain.held_out}) leaves nothing of prompts.size "
                f"({prompts.size}) to train on"
            )
        return
    for field in _TASK_ONLY:
        if getattr(prompts, field) != getattr(defaults, field):
            yield f"{key}.prompts.{field} goes with task and has no effect on a jsonl file"
    for field in ("jsonl", "held_out_jsonl"):
        file = getattr(prompts, field)
        if file is not None and not Path(file).is_file():
            yield f"{key}.prompts.{field}: no such file: {file} (working directory {Path.cwd()})"
    if prompts.held_out_jsonl is not None and prompts.jsonl is not None:
        if Path(prompts.held_out_jsonl).resolve() == Path(prompts.jsonl).resolve():
            yield f"{key}.prompts: jsonl and held_out_jsonl are the same file"


def _harness_prompts(domain: DomainConfig, key: str) -> Iterator[str]:
    """A task of lm-evaluation-harness: a test set, with a judge of its own."""
    prompts, defaults = domain.prompts, PromptsConfig()
    if key.startswith("domains."):
        yield (
            f"{key}.prompts.lm_eval is a test set and is never trained on; it goes under "
            "evaluation.general or evaluation.benchmarks"
        )
    for field in ("held_out_jsonl", "difficulty", *_TASK_ONLY):
        if getattr(prompts, field) != getattr(defaults, field):
            yield f"{key}.prompts.{field} has no effect on a task of lm-evaluation-harness"
    if prompts.lm_eval_folder is not None and not Path(prompts.lm_eval_folder).is_dir():
        yield f"{key}.prompts.lm_eval_folder: no such folder: {prompts.lm_eval_folder}"
    if domain.verifier is None or domain.verifier.name != "lm_eval":
        yield f"{key}.verifier: a task of lm-evaluation-harness is judged by itself: lm_eval"


def _verifier(domain: DomainConfig, key: str) -> Iterator[str]:
    verifier = domain.verifier
    if verifier is None:
        return
    if (verifier.name is None) == (verifier.target is None):
        got = "neither" if verifier.name is None else "both"
        yield f"{key}.verifier needs either name or target (package.module:function), got {got}"
        return
    defaults = VerifierConfig()
    for field in ("memory_gib", "network"):
        if verifier.target is None and getattr(verifier, field) != getattr(defaults, field):
            yield f"{key}.verifier.{field} bounds code of yours (target); {verifier.name} is ours"
    if verifier.target is not None and not _TARGET.match(verifier.target):
        yield (
            f"{key}.verifier.target: {verifier.target!r} is not of the form package.module:function"
        )
    elif verifier.name == "reasoning_gym" and domain.prompts.task is None:
        yield (
            f"{key}.verifier: reasoning_gym scores its own tasks only, and {key}.prompts names "
            "no task"
        )
    elif verifier.name == "lm_eval" and domain.prompts.lm_eval is None:
        yield (
            f"{key}.verifier: lm_eval judges tasks of lm-evaluation-harness only, and "
            f"{key}.prompts.lm_eval names none"
        )


def _weight_sync(config: Config) -> Iterator[str]:
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


def _student(config: Config) -> Iterator[str]:
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
    if student.routing_replay and student.recompute == "layers" and layout.pp > 1:
        yield (
            "student.routing_replay with student.recompute layers and student.parallel.pp "
            f"{layout.pp}: by the time a layer is computed again another micro-batch's choices "
            "are in place; use recompute attention, or pp 1"
        )
    if student.routing_replay and limits is not None and limits.num_experts == 0:
        yield f"student.routing_replay: {student.model} has no experts to route to; set it to false"
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


def _teachers_answers(config: Config) -> Iterator[str]:
    """What cannot be meant of answers that the student did not give."""
    if config.rollout.source != "teachers":
        return
    key, objective = "rollout.source is teachers", config.objective
    if objective.teacher.weight > 0:
        yield (
            f"{key}: the teachers' part of the objective is for the student's own answers; set "
            "objective.teacher.weight to 0 (configs/recipes/seqkd.yaml)"
        )
    if objective.truncation.kind != "none":
        yield (
            f"{key}: objective.truncation.kind {objective.truncation.kind} would weigh them by how "
            "likely the student is to give them; set it to none"
        )
    if objective.loss.name.startswith("dppo"):
        yield (
            f"{key}: objective.loss.name {objective.loss.name} drops tokens by the distance of the "
            "student from the policy that sampled it; take mopd"
        )
    if objective.kl.kind != "none":
        yield (
            f"{key}: objective.kl.kind {objective.kl.kind} estimates a distance from the student's "
            "own answers; set it to none"
        )
    if config.rollout.temperature != 1.0:
        yield (
            f"{key}: rollout.temperature must be 1, the temperature at which teachers score, got "
            f"{config.rollout.temperature:g}"
        )
    if config.student.routing_replay:
        yield f"{key}: student.routing_replay replays the student's own routes; set it to false"


def _evaluation(config: Config) -> Iterator[str]:
    evaluation, defaults = config.evaluation, EvaluationConfig()
    taken = dict.fromkeys(config.domains, "domains")
    for kind, sets in (("general", evaluation.general), ("benchmarks", evaluation.benchmarks)):
        yield from _names(sets, f"evaluation.{kind}", "set")
        for name, each in sets.items():
            key = f"evaluation.{kind}.{name}"
            if name in taken:
                yield f"{key}: {taken[name]} has that name already; results are kept by it"
            taken.setdefault(name, f"evaluation.{kind}")
            # Such a set is read as a domain is, without a split.
            alike = DomainConfig(prompts=each.prompts, verifier=each.verifier, held_out=0)
            yield from _prompts(alike, key)
            yield from _verifier(alike, key)
            if each.prompts.held_out_jsonl is not None:
                yield f"{key}.prompts.held_out_jsonl: all of a set is held out; use jsonl"
            if each.verifier is None:
                yield f"{key} has no verifier: its answers could not be judged"
            if kind == "general" and each.domain is not None:
                yield (
                    f"{key}.domain is {each.domain!r}, but a general set is nobody's; a further "
                    "set of a domain goes under evaluation.benchmarks"
                )
            if kind == "benchmarks" and each.domain not in config.domains:
                hint = nearest(each.domain, config.domains) if each.domain else ""
                yield f"{key}.domain: {each.domain!r} is not one of the domains{hint}"
    if evaluation.samples == 0:
        for field in ("temperature", "pass_at"):
            if getattr(evaluation, field) != getattr(defaults, field):
                yield f"evaluation.{field} has no effect while evaluation.samples is 0"
    elif wrong := [k for k in evaluation.pass_at if not 1 <= k <= evaluation.samples]:
        yield (
            f"evaluation.pass_at: {wrong} not within 1 and evaluation.samples "
            f"({evaluation.samples})"
        )
    if evaluation.patience and not evaluation.every:
        yield "evaluation.patience has no effect while evaluation.every is 0"
    if evaluation.patience and evaluation.keep_best == "off":
        yield "evaluation.patience needs evaluation.keep_best, by which a student is the better one"


def _names(entries: Mapping[str, Any], section: str, what: str) -> Iterator[str]:
    """Names must read as one word, and differ by more than case: they name files and metrics."""
    seen: dict[str, str] = {}
    for name in entries:
        folded = name.strip().casefold()
        if name != name.strip() or not name:
            hint = f"; did you mean {name.strip()!r}?" if name.strip() else ""
            yield f"{section}: the {what} name {name!r} is empty or has blanks around it{hint}"
        elif not _NAME.match(name):
            yield (
                f"{section}: the {what} name {name!r} may hold letters, digits, '_', '-' and '.' "
                "only, and starts with a letter, a digit or '_'"
            )
        if folded in seen:
            yield (
                f"{section}: {name!r} and {seen[folded]!r} differ only in case or blanks; "
                "give them clearly different names"
            )
        seen.setdefault(folded, name)
