"""Ranges, names and contradictions: each broken alone, all told together."""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mopd.config import (
    Config,
    check_config,
    config_warnings,
    load_config,
    objective,
    require_valid,
    schema,
)
from mopd.config.model_files import read_model_limits
from mopd.config.ranges import NAMES, RANGES, VERIFIER_NAMES
from mopd.config.wording import nearest
from mopd.errors import ConfigError, ModelError

Load = Callable[..., Config]
CLASSES = [
    each
    for module in (schema, objective)
    for each in vars(module).values()
    if dataclasses.is_dataclass(each) and each.__module__ == module.__name__
]


def only(problems: list[str]) -> str:
    assert len(problems) == 1, problems
    return problems[0]


def numeric_fields() -> Iterator[tuple[type, str, type]]:
    for cls in CLASSES:
        for name, kind in typing.get_type_hints(cls).items():
            options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
            for number in (int, float):
                if number in options:
                    yield cls, name, number


def instance(config: Config, cls: type) -> tuple[object, str]:
    """The part of the good configuration that is a `cls`, and its dotted key."""
    math = config.domains["math"]
    general = schema.EvaluationSetConfig(prompts=math.prompts, verifier=math.verifier)
    if cls is schema.EvaluationSetConfig:
        config.evaluation.general["common"] = general
    parts: dict[type, tuple[object, str]] = {
        schema.Config: (config, ""),
        schema.RayConfig: (config.ray, "ray."),
        schema.ParallelConfig: (config.student.parallel, "student.parallel."),
        schema.OptimizerConfig: (config.student.optimizer, "student.optimizer."),
        schema.StudentConfig: (config.student, "student."),
        schema.RolloutConfig: (config.rollout, "rollout."),
        schema.TeacherConfig: (config.teachers["math_rl"], "teachers.math_rl."),
        schema.PromptsConfig: (config.domains["code"].prompts, "domains.code.prompts."),
        schema.VerifierConfig: (config.domains["math"].verifier, "domains.math.verifier."),
        schema.DomainConfig: (config.domains["math"], "domains.math."),
        objective.ObjectiveConfig: (config.objective, "objective."),
        objective.TeacherSignalConfig: (config.objective.teacher, "objective.teacher."),
        objective.OrmConfig: (config.objective.orm, "objective.orm."),
        objective.ScheduleConfig: (
            config.objective.orm.alpha_schedule,
            "objective.orm.alpha_schedule.",
        ),
        objective.PolicyLossConfig: (config.objective.loss, "objective.loss."),
        objective.TruncationConfig: (config.objective.truncation, "objective.truncation."),
        objective.ReferenceKLConfig: (config.objective.kl, "objective.kl."),
        objective.BalanceConfig: (config.objective.balance, "objective.balance."),
        schema.TrainConfig: (config.train, "train."),
        schema.SamplingConfig: (config.train.sampling, "train.sampling."),
        schema.EvaluationConfig: (config.evaluation, "evaluation."),
        schema.EvaluationSetConfig: (general, "evaluation.general.common."),
        schema.FailuresConfig: (config.failures, "failures."),
        schema.WeightSyncConfig: (config.weight_sync, "weight_sync."),
    }
    return parts[cls]


def test_the_good_configuration_has_no_problem(loaded: Load) -> None:
    assert check_config(loaded()) == []
    require_valid(loaded())


@pytest.mark.parametrize(
    ("cls", "name", "kind"),
    list(numeric_fields()),
    ids=[f"{cls.__name__}.{name}" for cls, name, _ in numeric_fields()],
)
def test_every_number_has_a_range(loaded: Load, cls: type, name: str, kind: type) -> None:
    """A number added to the schema without a range fails here."""
    bounds = RANGES[cls][name]
    bad: list[float] = [] if math.isinf(bounds.low) else [-1]
    if bounds.low >= 1 or bounds.above:
        bad.append(0)
    if kind is float:
        bad += [math.nan, math.inf, -math.inf]
    if not math.isinf(bounds.high):
        bad.append(bounds.high + 1)
    for value in bad:
        config = loaded()
        part, key = instance(config, cls)
        setattr(part, name, kind(value) if math.isfinite(value) else value)
        found = [each for each in check_config(config) if each.startswith(f"{key}{name} must be")]
        assert len(found) == 1, (value, check_config(config))
        assert str(kind(value) if math.isfinite(value) else value) in found[0]


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, name) for cls, names in NAMES.items() for name in names]
)
def test_every_enumeration_suggests_the_nearest(loaded: Load, cls: type, name: str) -> None:
    for known in NAMES[cls][name]:
        config = loaded()
        part, key = instance(config, cls)
        setattr(part, name, known.upper() + "x")
        found = [each for each in check_config(config) if each.startswith(f"{key}{name}:")]
        assert f"did you mean {known!r}?" in only(found)


def test_names_are_those_that_are_built() -> None:
    """What configuration accepts and what the parts offer cannot drift apart."""
    from mopd import objective_names as names
    from mopd.data.verifiers import VERIFIERS
    from mopd.objective.aggregation import SEQUENCE_WEIGHTS
    from mopd.objective.orm import ORM_ESTIMATORS
    from mopd.objective.policy_losses import POLICY_LOSSES
    from mopd.objective.reference_kl import REFERENCE_KL
    from mopd.objective.truncation import TRUNCATIONS

    assert set(VERIFIER_NAMES) == set(VERIFIERS)
    assert set(names.ESTIMATORS) == {*ORM_ESTIMATORS, "reinforce", "ppo_gae"}
    assert set(names.AGGREGATIONS) == set(SEQUENCE_WEIGHTS)
    assert set(names.POLICY_LOSS_SPECS) == set(POLICY_LOSSES)
    assert set(names.TRUNCATION_BOUNDS) == set(TRUNCATIONS)
    assert set(names.REFERENCE_KLS) == {*REFERENCE_KL, "none"}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        # the run
        (["name=a/b"], "name 'a/b' names a folder"),
        (["name=.."], "name '..' names a folder"),
        (["name="], "name '' names a folder"),
        (["run_dir="], "run_dir is empty"),
        (["run_dir=math.jsonl"], "run_dir 'math.jsonl' is a file"),
        (["student.optimizer.warmup_steps=21"], "warmup_steps is 21, more than train.steps (20)"),
        (["student.optimizer.min_lr=0.1"], "min_lr (0.1) is above lr (0.001)"),
        (["objective.truncation.low=1.5"], "truncation.low must be at least 0 and at most 1"),
        (["objective.truncation.high=0.5"], "truncation.high must be at least 1"),
        # teachers
        (["domains.math.teacher=maths_rl"], "no teacher 'maths_rl'; did you mean 'math_rl'?"),
        (["domains.math.teacher=zzz"], "no teacher 'zzz'; known: code_rl, math_rl"),
        (["domains.math.teacher=[math_rl, code_rl]"], "a domain has exactly one teacher, by name"),
        (["teachers.math_rl.model=null"], "has neither model (a checkpoint to serve) nor endp"),
        (["teachers.math_rl.model=gone"], "teachers.math_rl.model: gone does not exist"),
        (["teachers.math_rl.model=math.jsonl"], "math.jsonl is a file, expected a checkpoint"),
        (["teachers.math_rl.model=empty"], "empty has no config.json, no *.saf"),
        (["teachers.math_rl.model=sharded"], "sharded has no b.safetensors"),
        (["teachers.math_rl.model=cut"], "bytes, but its header speaks of"),
        (["student.model=cut"], "cut/model.safetensors has"),
        (["teachers.math_rl.model=empty_weights"], "is cut short or no safetensors file (0 bytes)"),
        (["teachers.math_rl.model=text"], "no safetensors file: its header is not readable"),
        (["teachers.math_rl.model=pointer"], "is a git-lfs pointer, not weights"),
        (["teachers.math_rl.model=mute"], "has no tokenizer.json, no tokenizer_config.json"),
        (["teachers.math_rl.model=broken"], "teachers.math_rl.model: broken/config.json: not val"),
        (["teachers.math_rl.max_model_len=129"], "max_model_len is 129, more than teacher can re"),
        (["teachers.math_rl={gpus: 1, tensor_parallel_size: 2}"], "more than teachers.math_rl.gp"),
        (["teachers.math_rl.tensor_parallel_size=3"], "3 does not divide the 4 heads of teacher"),
        (["teachers.math_rl.model=base/nix"], "base/nix does not exist"),
        (["teachers.math_rl.revision=abc"], "is a folder, which has no revision ('abc')"),
        (["teachers.code_rl.replicas=2"], "teachers.code_rl.replicas would have no effect"),
        (["teachers.code_rl.engine_args.a=2"], "teachers.code_rl.engine_args would have no eff"),
        (["teachers.code_rl.endpoints=10.0.0.7:8000"], "'10.0.0.7:8000' is not a URL"),
        (["teachers.code_rl.endpoints=http://a:99999"], "is not a URL"),
        (["teachers.code_rl.endpoints=http://u:pw@a"], "'http://...@a' has a user or a password"),
        (["teachers.code_rl.endpoints=[http://a, http://a/]"], "http://a is listed twice"),
        (["teachers.math_rl.engine_args.max-model-len=5"], "use teachers.math_rl.max_model_len"),
        (["teachers.math_rl.engine_args.port=5"], "chosen by mopd for each server"),
        # Ray
        (["ray={address: auto, num_cpus: 8}"], "ray.num_cpus (8) has no effect on a cluster"),
        (["ray.num_cpus=3"], "1 x student rank (1 CPU), 1 x rollout engine (1 CPU), 1 x teacher m"),
        # domains
        (["domains.math.prompts.jsonl=nix.jsonl"], "no such file: nix.jsonl"),
        (["domains.math.prompts.jsonl=null"], "domains.math.prompts needs jsonl (a file) or task"),
        (["domains.math.prompts.task=spell_backward"], "has both jsonl and task"),
        (["domains.math.prompts.params.a=1"], "domains.math.prompts.params goes with task"),
        (["domains.math.prompts.held_out_jsonl=nix"], "held_out_jsonl: no such file: nix"),
        (["domains.math.prompts.held_out_jsonl=./math.jsonl"], "are the same file"),
        (["domains.code.prompts.held_out_jsonl=math.jsonl"], "held_out_jsonl goes with jsonl"),
        (["domains.code.held_out=2000"], "leaves nothing of prompts.size (2000)"),
        (["domains.code.prompts.params.x=.nan"], "prompts.params.x must be a finite number"),
        (["domains.math.verifier.name=null"], "domains.math.verifier needs either name or target"),
        (["domains.math.verifier.target=a:b"], "either name or target (package.module:function)"),
        (["domains.code.verifier={target: a.b}"], "'a.b' is not of the form package.module:func"),
        (["domains.math.verifier=reasoning_gym"], "domains.math.prompts names no task"),
        (["domains.math.weight=0", "domains.code.weight=0"], "every domain has weight 0"),
        # objective
        (["domains.code.alpha=0.1"], "domains.code.alpha is 0.1, but domains.code has no verifier"),
        (
            ["objective.orm.alpha=0.1"],
            "objective.orm.alpha is 0.1, but domains.code has no verifier",
        ),
        (["domains.math.alpha=0.1", "train.samples_per_prompt=1"], "is always 0: sample 2 or more"),
        # student
        (["student.model=gone"], "student.model: gone does not exist"),
        (["student.model=org/name"], "student.model: org/name does not exist"),
        (["student.model=odd"], "num_hidden_layers should be a positive whole number, got '2'"),
        (["student.model=broken"], "config.json: not valid JSON"),
        (["student.parallel.ep=2"], "ep * etp = 2 must divide dp * tp = 1"),
        (["student.parallel={ep: 3, dp: 3}"], "ep 3 does not divide the 8 experts of base"),
        (["student.parallel.tp=4"], "tp 4 does not divide the 2 KV heads of base"),
        (["student.parallel.pp=3"], "pp 3 does not divide the 2 layers of base"),
        (["student.model=dense", "student.parallel={ep: 2, dp: 2}"], "dense has no experts"),
        (["rollout.max_response_tokens=128"], "leaves no room for a prompt in the context of base"),
    ],
)
def test_one_problem_each(
    loaded: Load, checkpoint: Callable[..., None], overrides: list[str], says: str
) -> None:
    Path("empty").mkdir()
    checkpoint(Path("sharded"))
    Path("sharded/model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "model.safetensors", "y": "b.safetensors"}}'
    )
    checkpoint(Path("dense"), num_experts=None)
    checkpoint(Path("odd"), num_hidden_layers="2")
    checkpoint(Path("broken"))
    Path("broken/config.json").write_text("{")
    checkpoint(Path("cut"), cut=1)
    for folder in ("empty_weights", "text", "pointer", "mute"):
        checkpoint(Path(folder))
    Path("empty_weights/model.safetensors").write_bytes(b"")
    Path("text/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    Path("pointer/model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    Path("mute/tokenizer.json").unlink()
    Path("mute/tokenizer_config.json").unlink()
    assert says in only(check_config(loaded(*overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        ["student.parallel={dp: 2, ep: 2}"],
        ["student.parallel={tp: 2}"],
        ["student.parallel={tp: 2, ep: 2}"],
        ["student.parallel={dp: 2, tp: 2, ep: 2, etp: 2}"],
        ["student.parallel={pp: 2, dp: 8, ep: 8}"],
        ["ray.num_cpus=4"],
        ["ray.address=auto"],
        ["teachers.math_rl={max_model_len: 128, gpus: 2, tensor_parallel_size: 2}"],
        ["teachers.math_rl={model: long, max_model_len: 512}"],
        ["domains.math.alpha=0.1"],
        ["objective.orm.alpha=0.1", "domains.code.alpha=0"],
        ["objective.orm.alpha=0.1", "domains.code.verifier=reasoning_gym"],
        ["domains.math.weight=0"],
        ["rollout.max_response_tokens=127"],
        ["teachers.code_rl.endpoints=[http://a:1, https://b/x]", "teachers.code_rl.model=served"],
    ],
)
def test_what_is_fine(loaded: Load, checkpoint: Callable[..., None], overrides: list[str]) -> None:
    checkpoint(Path("long"), rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert check_config(loaded(*overrides)) == []


def gpus(each: float) -> list[str]:
    return [f"student.gpus_per_rank={each}", f"rollout.gpus_per_engine={each}"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["weight_sync.transport=nccl"], "gpus_per_rank is 0 and rollout.gpus_per_engine 0"),
        (["weight_sync.transport=ipc", "student.gpus_per_rank=0.5"], "on a CPU take shared_memory"),
        (
            ["weight_sync.transport=nccl", *gpus(0.5)],
            "NCCL cannot join two processes on one GPU",
        ),
        (["weight_sync.transport=ipc", *gpus(1)], "which shares none"),
        (["weight_sync.transport=file"], "needs weight_sync.directory"),
        (["weight_sync.directory=."], "is of transport file; shared_memory has no folder"),
        (["weight_sync.transport=file", "weight_sync.directory=gone"], "gone is no folder"),
        (["weight_sync.transport=rdma"], "not one of shared_memory, file, nccl, ipc"),
    ],
)
def test_how_weights_travel(loaded: Load, overrides: list[str], says: str) -> None:
    assert says in only(check_config(loaded(*overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        ["weight_sync.transport=file", "weight_sync.directory=."],
        ["weight_sync.transport=nccl", "student.gpus_per_rank=1", "rollout.gpus_per_engine=1"],
        ["weight_sync.transport=ipc", "student.gpus_per_rank=0.5", "rollout.gpus_per_engine=0.5"],
    ],
)
def test_ways_for_weights_that_fit(loaded: Load, overrides: list[str]) -> None:
    assert check_config(loaded(*overrides)) == []


def test_no_domains_at_all(loaded: Load) -> None:
    config = loaded()
    config.domains = {}
    assert "no domains" in only(check_config(config))


@pytest.mark.parametrize("name", ["Math ", " math", "MATH", "", "  ", "a b", "a/b", "-x", ".x"])
def test_names_that_cannot_be_told_apart_or_written(loaded: Load, name: str) -> None:
    for section in ("domains", "teachers"):
        config = loaded()
        entries = getattr(config, section)
        if section == "teachers":
            entries["math"] = entries["math_rl"]
        entries[name] = entries["math"]
        problems = check_config(config)
        assert problems and all(p.startswith(f"{section}: ") for p in problems), problems
        assert repr(name) in problems[0]
    if name == "Math ":
        assert "did you mean 'Math'?" in problems[0] and "'math' differ only" in problems[1]


def test_all_problems_are_told_at_once(loaded: Load) -> None:
    config = loaded("train.steps=0", "student.dtype=flaot32", "student.model=gone")
    config.student.optimizer.lr = math.nan
    with pytest.raises(ConfigError) as error:
        require_valid(config)
    for part in [
        "train.steps",
        "'flaot32'",
        "gone",
        "student.optimizer.lr",
        "did you mean 'float32'",
    ]:
        assert part in str(error.value)


def test_hub_names(
    loaded: Load, checkpoint: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run fetches nothing; what is in the cache is checked like a folder, in its revision."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", os.path.abspath("hf"))
    override = "teachers.math_rl.model=org/name"
    problem = only(check_config(loaded(override)))
    assert "'org/name' is no folder here" in problem and "hf download org/name" in problem
    problem = only(check_config(loaded(override, "teachers.math_rl.revision=abc")))
    assert "hf download org/name --revision abc" in problem
    cached = Path("hf/hub/models--org--name/snapshots/abc")
    checkpoint(cached)
    assert check_config(loaded(override)) == []
    assert check_config(loaded(override, "teachers.math_rl.revision=abc")) == []
    assert "revision" in only(check_config(loaded(override, "teachers.math_rl.revision=v1")))
    references = Path("hf/hub/models--org--name/refs")
    references.mkdir()
    (references / "v1").write_text("abc")
    assert check_config(loaded(override, "teachers.math_rl.revision=v1")) == []
    (cached / "model.safetensors").write_bytes(b"")
    assert "is cut short" in only(check_config(loaded(override)))
    Path("org").mkdir()  # now it reads as a path
    assert "org/name does not exist" in only(check_config(loaded(override)))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["domains.code.teacher=math_rl"], "teachers.code_rl: no domain names it"),
        (["train.prompts_per_step=1"], "1 for 2 domains"),
        (["domains.math.weight=0"], "domains.math.weight is 0"),
        (["domains.math.held_out=0"], "domains.math.held_out is 0"),
        (["teachers.math_rl.tensor_parallel_size=2"], "tensor_parallel_size is 2 with gpus 0"),
        (["student.dtype=bfloat16"], "weight_sync.max_logprob_error"),
        (["ray.address=auto"], "every rank and engine must be on one machine"),
    ],
)
def test_warnings(loaded: Load, overrides: list[str], says: str) -> None:
    usual = ["domains.code has no verifier: it has no reward and no score"]
    assert config_warnings(loaded()) == usual
    new = [each for each in config_warnings(loaded(*overrides)) if each not in usual]
    assert says in only(new)
    assert check_config(loaded(*overrides)) == []


def test_limits_of_a_checkpoint(place: Path, checkpoint: Callable[..., None]) -> None:
    limits = read_model_limits(place / "base")
    assert (limits.max_position_embeddings, limits.num_experts, limits.num_kv_heads) == (128, 8, 2)
    checkpoint(place / "plain", num_experts=None, num_key_value_heads=None)
    plain = read_model_limits(place / "plain")
    assert (plain.num_experts, plain.num_kv_heads) == (0, 4)
    for changes, says in [
        ({"max_position_embeddings": None}, "no max_position_embeddings or n_positions"),
        ({"vocab_size": 0}, "vocab_size should be a positive"),
        ({"vocab_size": True}, "vocab_size should be a positive"),
    ]:
        checkpoint(place / "bad", **changes)
        with pytest.raises(ModelError, match=says):
            read_model_limits(place / "bad")
    with pytest.raises(ModelError, match="cannot be read"):
        read_model_limits(place / "nix")


def test_a_known_name_is_listed_once() -> None:
    assert nearest("xyz", ["household", "household"]) == "; known: household"


def test_saved_runs_stay_valid(loaded: Load) -> None:
    from mopd.config import save_config

    save_config(loaded(), "again.yaml")
    assert check_config(load_config(["again.yaml"])) == []
