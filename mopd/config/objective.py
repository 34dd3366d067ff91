"""The `objective` part of the configuration: what a step descends on. Imports no torch.

Sections of the formulas are in `docs/objectives.md`. None stands for "the default of the kind
chosen" where a default depends on it; a value that the kind chosen does not read is refused at
start-up (`mopd.config.objective_checks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ScheduleConfig:
    """A value over the steps: 0 before `from_step`, then as `kind` says."""

    kind: str = "constant"  # constant | linear | cosine
    value: float = 1.0  # at from_step
    end_value: float | None = None  # linear, cosine: at until_step and after
    from_step: int = 0
    until_step: int | None = None  # linear, cosine; null: train.steps


@dataclass
class TeacherSignalConfig:
    """The distillation part: how the teacher's opinion of a token becomes a gradient."""

    weight: float = 1.0  # 0: no distillation part; the teachers are not asked
    signal: str = "sampled"  # sampled (an advantage) | topk | full (differentiable divergences)
    direction: str = "reverse"  # reverse | forward | jsd; sampled is reverse
    jsd_beta: float | None = None  # jsd: weight of the teacher in the mixture, .5
    top_k: int | None = None  # topk: ids a position, besides the sampled one
    support: str | None = None  # topk: whose ids, teacher (default) | student
    clip: float = 5.0  # sampled: bound on |log T - log pi|, nats; 0 turns it off
    reward_to_go: bool = False  # sampled: a token also answers for the tokens after it
    refresh: bool = True  # several updates a batch: log pi of now, not of the batch's start


@dataclass
class OrmConfig:
    """The outcome-reward part: alpha * A_ORM of each sample within its group."""

    alpha: float = 0.0  # domains.NAME.alpha overrides it
    alpha_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # factor on each alpha
    estimator: str = "grpo"  # reinforce|grpo|rloo|dr_grpo|agapo|maxrl|kimi|ppo_gae
    reward: str = "correct"  # correct (exact match) | score (partial credit)
    whiten: bool = False  # z-score over the batch, before alpha
    zero_variance: str = "keep"  # keep | drop: groups whose rewards are all equal
    baseline: float | None = None  # reinforce: a constant; null: running mean of the rewards
    baseline_decay: float | None = None  # reinforce: of that running mean, .9
    gae_gamma: float | None = None  # ppo_gae: discount, 1
    gae_lambda: float | None = None  # ppo_gae: .95
    critic_lr: float | None = None  # ppo_gae: learning rate of the value head, 1e-3
    all_wrong: float | None = None  # agapo: advantage in a group without a success, 0
    overlong_buffer: int | None = None  # DAPO: tokens before the limit where a penalty sets in
    length_reward: ScheduleConfig | None = None  # Kimi K1.5: weight of the length reward


@dataclass
class PolicyLossConfig:
    """The per-token policy loss; null takes the loss's own default."""

    name: str = "mopd"  # mopd|ppo|dapo|cispo|gspo|gspo_token|sapo|dppo_tv|dppo_kl|dppo_topk|kimi
    clip_low: float | None = None
    clip_high: float | None = None
    tau_positive: float | None = None
    tau_negative: float | None = None
    delta: float | None = None
    mu: float | None = None


@dataclass
class TruncationConfig:
    """What happens to tokens on which trainer and rollout engine disagree."""

    kind: str = "icepop"  # icepop | tis | mis | seq_mask | raw | none
    low: float | None = None  # icepop .5, seq_mask .5
    high: float | None = None  # icepop 5, tis 2, mis 2, seq_mask 2
    ratio: str = "auto"  # current (pi / mu) | old (pi_old / mu) | auto: what the loss calls for


@dataclass
class ReferenceKLConfig:
    """A regulariser toward a reference policy, of the sampled tokens."""

    kind: str = "none"  # none | k2 (reverse-KL gradient) | k3 (forward-KL gradient)
    weight: float = 0.0
    reference: str | None = None  # a name in teachers; null: each sample's own teacher


@dataclass
class BalanceConfig:
    """Weights of the domains in the loss."""

    kind: str = "none"  # none | token_share | gap
    targets: dict[str, float] = field(default_factory=dict)  # empty: equal
    exponent: float | None = None  # gap: 1
    low: float | None = None  # gap: bounds of its factor, .05 and 20
    high: float | None = None


@dataclass
class ObjectiveConfig:
    """L = -1/N sum 1/|y| sum_t w_t A_t log pi by default (MOPD, MiMo-V2-Flash eq. 5-9)."""

    teacher: TeacherSignalConfig = field(default_factory=TeacherSignalConfig)
    orm: OrmConfig = field(default_factory=OrmConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    truncation: TruncationConfig = field(default_factory=TruncationConfig)
    kl: ReferenceKLConfig = field(default_factory=ReferenceKLConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    aggregation: str = "sequence"  # token | sequence | prompt | constant
    denominator: str = "response"  # response | kept: does a dropped token stay in |y|
    constant_length: float | None = None  # constant: its L, tokens
