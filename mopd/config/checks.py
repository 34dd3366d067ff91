"""Ranges, names and contradictions of a loaded configuration, all problems at once.

Reads at most the `config.json` of model folders; imports no torch, vllm or ray. What needs the
prompts themselves (lengths, leaks, verifiers) is checked by `mopd.data`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mopd.config.domain_checks import check_domains
from mopd.config.evaluation_checks import check_evaluation
from mopd.config.names import NAME
from mopd.config.objective_checks import check_objective
from mopd.config.objective_warnings import objective_warnings
from mopd.config.placement import placement_text, total_reserved
from mopd.config.ranges import check_values
from mopd.config.schema import Config
from mopd.config.student_checks import check_student, check_weight_sync
from mopd.config.teacher_checks import check_teachers
from mopd.config.teachers import asked_teachers
from mopd.config.train_checks import check_train
from mopd.errors import ConfigError


def require_valid(config: Config) -> None:
    """Raise one ConfigError that lists every problem of `check_config`."""
    if problems := check_config(config):
        raise ConfigError.listing("the configuration cannot run", problems)


def check_config(config: Config) -> list[str]:
    """Every problem that can be seen without loading anything; empty when there is none."""
    return [
        *check_values(config, ""),
        *_run(config),
        *check_teachers(config),
        *check_domains(config),
        *check_objective(config),
        *check_train(config),
        *check_student(config),
        *check_weight_sync(config),
        *check_evaluation(config),
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
    if not NAME.match(config.name):
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
