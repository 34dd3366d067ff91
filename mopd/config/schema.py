"""Every configuration key, its type and its one default. Imports no torch, vllm or ray.

`mopd.config.load` merges YAML files and ``key=value`` overrides into this tree, refuses unknown
keys, and checks ranges and contradictions (`mopd.config.checks`). Relative paths are relative to
the working directory. Units: tokens, seconds (``_s``), GiB (``_gib``), nats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from mopd.config.objective import ObjectiveConfig


@dataclass
class RayConfig:
    """Where Ray runs: null starts it in this process on loopback, 'auto' joins a cluster."""

    address: str | None = None
    num_cpus: int | None = None


@dataclass
class ParallelConfig:
    """Megatron layout; the student has dp * tp * pp ranks, experts are spread over ep of them.

    Sequence parallelism goes with tp. cp (context parallelism) must be 1: see docs/student.md."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1


@dataclass
class OptimizerConfig:
    """Adam with linear warm-up, then `schedule` down to `min_lr` at the run's last step."""

    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_steps: int = 10
    schedule: str = "cosine"  # constant | linear | cosine
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # global gradient norm; 0 turns clipping off
    distributed: bool = False  # Adam's state spread over the data-parallel ranks


@dataclass
class StudentConfig:
    """The trained model: a Hugging Face checkpoint folder and how Megatron runs it."""

    model: str = MISSING
    dtype: str = "float32"  # float32 | bfloat16
    freeze_routers: bool = True
    router_bias_update_rate: float = 0.0  # of expert biases, where freeze_routers is false
    routing_replay: bool = False  # train on the expert choices of the rollout (R3)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_size: int = 64  # samples per forward per data-parallel rank
    max_tokens_per_microbatch: int | None = None  # instead: tokens per forward, padding included
    packing: bool = False  # the samples of a forward lie end to end in one row, without padding
    recompute: str = "none"  # none | attention | layers: activations computed again, not kept
    kernel: str = "auto"  # auto | triton | torch: who computes the logprobs
    loss_head: str = "logits"  # logits | fused: the LM head tile by tile, its logits never whole
    fp32_head: bool = False  # the LM head's product and logits in float32, rollouts' too
    checkpoint_format: str = "huggingface"  # | megatron: every rank writes its own part
    checkpoint_async: bool = False  # written while training goes on, from a copy (megatron only)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    threads_per_rank: int = 1
    gpus_per_rank: float = 0.0


@dataclass
class RolloutConfig:
    """vLLM engines that sample the student."""

    engines: int = 1
    source: str = "student"  # | teachers: train on their answers instead (SeqKD, a baseline)
    temperature: float = 1.0
    max_response_tokens: int = MISSING
    ignore_eos: bool = False  # sample on to max_response_tokens (benchmarks)
    max_num_seqs: int = 256
    kv_cache_gib: float = 0.125
    threads_per_engine: int = 1
    gpus_per_engine: float = 0.0


@dataclass
class TeacherConfig:
    """One teacher: either `model` (a server is started and supervised) or `endpoints` (URLs of
    vLLM servers already running), in which case `model` is the name they must serve, if given; or
    a `mixture` of such: the geometric mean of its members by weight."""

    model: str | None = None
    revision: str | None = None
    endpoints: list[str] = field(default_factory=list)
    dtype: str = "float32"
    replicas: int = 1
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    kv_cache_gib: float = 0.125
    threads: int = 1
    gpus: float = 0.0
    concurrency: int = 64  # requests in flight per server
    timeout_s: float = 60.0
    retries: int = 2
    hedge_after_s: float | None = None  # then a second idle server is asked, too; null: never
    hedge_quantile: float | None = None  # and not before so many of the last 512 had answers
    cache_mib: float = 0.0  # of scores kept for when the same tokens come again; 0: none
    start_timeout_s: float = 300.0
    max_restarts: int = 3  # of dead or hung servers, in one run; then its samples fail
    pause_s: float = 120.0  # wait for it, when no server of it answers, before samples fail
    api_key_env: str | None = None  # environment variable with the bearer token of its servers
    engine_args: dict[str, Any] = field(default_factory=dict)  # further vLLM server arguments
    mixture: dict[str, float] = field(default_factory=dict)  # names in teachers -> weights


@dataclass
class PromptsConfig:
    """Where prompts come from: `jsonl` (a file), `task` (a reasoning-gym task) or, for evaluation
    sets, `lm_eval` (a task of lm-evaluation-harness)."""

    jsonl: str | None = None
    held_out_jsonl: str | None = None  # else held-out rows are split off by prompt content
    task: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    size: int = 2000  # items generated before duplicates are dropped (task only)
    seed: int = 0
    template: str = "{question}"  # rendered from the item's metadata (task only)
    key_fields: list[str] = field(default_factory=list)  # what makes two items the same item
    unordered_key: bool = False
    chat: bool = False  # render through the tokenizer's chat template
    lm_eval: str | None = None  # name of a task of lm-evaluation-harness (extra lm-eval)
    lm_eval_folder: str | None = None  # folder with further task files of it (lm_eval only)
    fewshot: int | None = None  # solved examples in each prompt; null: as the task says
    difficulty: str | None = None  # field (of the row or the item's metadata) holding a number


@dataclass
class VerifierConfig:
    """By built-in `name`, or the user's own by `target: package.module:function`."""

    name: str | None = None
    target: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 10.0
    memory_gib: float = 4.0  # of target's process, and of each that it starts
    network: bool = False  # whether target's process may use it
    env: list[str] = field(default_factory=list)  # variables that target's process may see, too


@dataclass
class DomainConfig:
    """One domain: its teacher, prompts, verifier and weights."""

    teacher: str = MISSING
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    held_out: int = 200  # prompts kept for evaluation, never trained on
    verifier: VerifierConfig | None = None
    alpha: float | None = None  # weight of the ORM advantage; null takes objective.orm.alpha
    weight: float = 1.0  # share of the prompts drawn


@dataclass
class SamplingConfig:
    """Which prompts of a domain are drawn, and which groups are drawn again."""

    order: str = "shuffle"  # shuffle | prioritised (by failure rate) | curriculum (easy to hard)
    min_priority: float | None = None  # prioritised: weight of a prompt that never fails, .05
    curriculum_start: float | None = None  # curriculum: easiest share drawn from at first, .2
    curriculum_steps: int | None = None  # curriculum: steps until all are; null: train.steps
    retire_above: float | None = None  # prompts passed at least this often are not drawn again
    retire_after: int | None = None  # ... once this many of their answers were judged, 4
    dynamic_rounds: int = 0  # extra rounds that replace groups whose rewards are all equal


@dataclass
class TrainConfig:
    """Length of the run and size of a step.

    Samples a step = prompts_per_step * samples_per_prompt; optimizer updates a step = epochs *
    minibatches.
    """

    steps: int = MISSING
    prompts_per_step: int = MISSING
    samples_per_prompt: int = 4
    epochs: int = 1  # passes over a step's samples
    minibatches: int = 1  # updates a pass, each on a part of the prompts
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    checkpoint_every: int = 50
    keep_checkpoints: int = 2


@dataclass
class EvaluationSetConfig:
    """Held-out items beside the domains' own, every one of them for evaluation."""

    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    verifier: VerifierConfig | None = None
    items: int | None = None  # how many, chosen by content; null: all there are
    domain: str | None = None  # of a benchmark: the domain whose score it is a part of


@dataclass
class EvaluationConfig:
    """Greedy answers on held-out prompts, before, during and after; more by `mopd evaluate`."""

    every: int = 25  # steps between evaluations of the student; 0: only before and after
    bootstrap: int = 2000
    seed: int = 0
    general: dict[str, EvaluationSetConfig] = field(default_factory=dict)  # nobody's: forgetting
    benchmarks: dict[str, EvaluationSetConfig] = field(default_factory=dict)  # more of a domain
    samples: int = 0  # sampled answers an item by `mopd evaluate`, for mean@n and pass@k; 0: none
    temperature: float = 1.0  # of the sampled answers
    pass_at: list[int] = field(default_factory=lambda: [1])
    keep_best: str = "worst_headroom"  # | mean_headroom | worst_retention | off: of RUN/best
    patience: int = 0  # evaluations without a better student before the run ends; 0: never


@dataclass
class FailuresConfig:
    """How many samples may fail (teacher or rollout) before the run stops."""

    max_masked_fraction: float = 0.1  # of one step's samples
    max_verifier_failures: float = 0.1  # of one step's samples


DEVICE_TRANSPORTS = ("nccl", "ipc")
"""Those of `weight_sync.transport` that go from GPU to GPU."""


@dataclass
class WeightSyncConfig:
    """How weights reach the rollout engines, and the proof: logprobs on a fixed probe batch."""

    transport: str = "shared_memory"  # one machine | file: any | nccl | ipc: GPUs
    directory: str | None = None  # of transport file: a folder that all machines see
    probe_sequences: int = 4
    max_logprob_error: float = 1e-3  # nats; float32. bfloat16 engines need a wider one


@dataclass
class Config:
    """The whole tree."""

    name: str = MISSING
    run_dir: str = "runs"
    seed: int = 0
    resume: bool = False  # go on from the run's newest checkpoint, if there is one
    overwrite: bool = False  # remove a run of the same name first
    ray: RayConfig = field(default_factory=RayConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    domains: dict[str, DomainConfig] = field(default_factory=dict)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    failures: FailuresConfig = field(default_factory=FailuresConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
