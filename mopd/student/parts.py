"""One rank's model with what works on it, built in the order that Megatron needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mopd.config.objective import ObjectiveConfig
from mopd.config.schema import StudentConfig
from mopd.student import model as models
from mopd.student import output_head
from mopd.student.critic import Critic
from mopd.student.expert_bias import ExpertBiases
from mopd.student.families.base import Family
from mopd.student.forwards import Forwards, Sequences
from mopd.student.loss_head import LossHead
from mopd.student.optimizer import Optimizer
from mopd.student.routing import RoutingReplay
from mopd.student.teacher_models import TeacherModels
from mopd.student.tensor_files import SafetensorsFolder
from mopd.student.token_scores import TokenScorer, VocabularyShard
from mopd.student.weights import ShardedWeights
from mopd.types import TrainSample


@dataclass(frozen=True)
class Setting:
    """What a student is built from."""

    config: StudentConfig
    objective: ObjectiveConfig
    family: Family
    domains: Sequence[str]
    temperature: float
    """Of the rollouts; the objective's logprobs are of softmax(logits / T)."""
    valid_vocab: int
    pad_id: int
    device: torch.device
    teacher_folders: Mapping[str, Path]
    """Domain -> its teacher's checkpoint, for the signal `full`."""

    @property
    def rows_per_rank(self) -> int:
        """Of the head: as many on each tensor-parallel rank, with rows added at the end."""
        return -(-self.family.vocabulary // self.config.parallel.tp)


@dataclass(frozen=True)
class Parts:
    """See the module's text."""

    model: Any
    weights: ShardedWeights
    ddp: Any
    """Megatron's wrapper of the model."""
    optimizer: Optimizer
    head: LossHead
    critic: Critic | None
    biases: ExpertBiases | None
    """Where they are trained."""
    forwards: Forwards

    def logprobs(
        self,
        sequences: Sequences,
        temperature: float,
        vocabulary: int,
        samples: Sequence[TrainSample] | None = None,
    ) -> list[list[float]]:
        """[R] logprobs of each sequence's response ids, of softmax(logits / T) over the first
        `vocabulary` ids. Collective. samples: see `Forwards.per_token`."""
        scorer = self.head.scorer
        return self.forwards.per_token(
            sequences,
            lambda batch, out: scorer.logprobs(batch.rows, out, temperature, vocabulary)[0],
            samples,
        )


def build(setting: Setting, source: SafetensorsFolder) -> Parts:
    """Every rank at once, with the weights of `source`."""
    from megatron.core import parallel_state as ps

    config, device = setting.config, setting.device
    model = models.build(setting.family, config, setting.rows_per_rank * config.parallel.tp)
    slots = models.slots(model, setting.family)
    models.mark_experts(model, slots)
    if config.freeze_routers:
        models.freeze_routers(model)
    replay = RoutingReplay(model) if config.routing_replay else None
    biases: ExpertBiases | None = None
    if config.router_bias_update_rate > 0 and not config.freeze_routers:
        biases = ExpertBiases(
            model, config.router_bias_update_rate, recomputed=config.recompute == "layers"
        )
    weights = ShardedWeights(
        slots,
        (ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()),
        (ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()),
    )
    weights.load(source, models.state(model))
    ddp = _wrap(model, config)
    optimizer = Optimizer(ddp, config.optimizer, models.DTYPES[config.dtype])
    last_stage = ps.is_pipeline_last_stage()
    head = _loss_head(model, setting, last_stage)
    response_rows = (
        output_head.ResponseRows(model) if last_stage and config.parallel.tp == 1 else None
    )
    speaks = last_stage and ps.get_tensor_model_parallel_rank() == 0
    critic: Critic | None = None
    if setting.objective.orm.estimator == "ppo_gae":
        critic = Critic(
            model.config.hidden_size, setting.objective.orm, device=device, speaks=speaks
        )
        if last_stage:
            critic.watch(model)
    forwards = Forwards(
        ddp,
        config,
        setting.pad_id,
        device,
        dp=ps.get_data_parallel_world_size(),
        dp_rank=ps.get_data_parallel_rank(),
        speaks=speaks,
        replay=replay,
        biases=biases,
        head=response_rows,
    )
    return Parts(model, weights, ddp, optimizer, head, critic, biases, forwards)


def _wrap(model: Any, config: StudentConfig) -> Any:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=config.optimizer.distributed,
            overlap_grad_reduce=False,
            grad_reduce_in_fp32=True,
            average_in_collective=False,
        ),
        model,
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    return ddp


def _loss_head(model: Any, setting: Setting, last_stage: bool) -> LossHead:
    """Call after the DDP wrap: the last layer's weight is then where gradients are summed."""
    from megatron.core import parallel_state as ps

    config, objective = setting.config, setting.objective
    fused = config.loss_head == "fused"
    if last_stage and fused:
        output_head.emit_hidden_states(model)
    elif last_stage and config.fp32_head:
        output_head.emit_float32_logits(model)
    shard = VocabularyShard(
        ps.get_tensor_model_parallel_rank() * setting.rows_per_rank,
        ps.get_tensor_model_parallel_group(),
        config.kernel,
    )
    teachers = None
    if last_stage and objective.teacher.signal == "full":
        teachers = TeacherModels(
            setting.teacher_folders,
            dtype=models.DTYPES[config.dtype],
            device=setting.device,
            vocab_start=shard.start,
            rows=setting.rows_per_rank,
        )
    scorer = TokenScorer(
        shard,
        head_weight=output_head.head_weight(model) if fused else None,
        head_dtype=torch.float32 if config.fp32_head else None,
        keep_output=objective.teacher.signal != "sampled",
    )
    return LossHead(
        objective,
        setting.domains,
        scorer,
        temperature=setting.temperature,
        valid_vocab=setting.valid_vocab,
        device=setting.device,
        teachers=teachers,
    )
