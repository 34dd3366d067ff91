"""One rank of the trained model: steps, logprobs, export, checkpoints.

Every method is collective: all ranks call it with the same arguments, and all get the same answer
or the same error. One `StudentRank` a process, because torch and Megatron keep process groups as
process globals.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mopd.config.objective import ObjectiveConfig
from mopd.config.schema import StudentConfig
from mopd.errors import ModelError
from mopd.objective.stats import SUM_COLUMNS, summarise
from mopd.student import (
    batching,
    checkpoint,
    cpu_platform,
    microbatches,
    model,
    output_head,
    parallel,
    planning,
    routing,
)
from mopd.student.critic import Critic
from mopd.student.loss_head import LossHead, Update
from mopd.student.microbatches import Microbatch
from mopd.student.opening import open_checkpoint
from mopd.student.optimizer import Optimizer
from mopd.student.publishing import Publisher
from mopd.student.routing import RoutingReplay
from mopd.student.save_hf import copy_settings, without_padding_tokens
from mopd.student.schedule import learning_rate
from mopd.student.teacher_models import TeacherModels
from mopd.student.token_scores import TokenScorer, VocabularyShard
from mopd.student.weights import SafetensorsFolder, ShardedWeights
from mopd.types import TrainSample

CRITIC = "critic.safetensors"
"""The value head's file in a checkpoint."""


@dataclass
class _Before:
    """Of a step, before its first update, by sample id; [R] each."""

    old: dict[str, list[float]] | None = None
    """log pi_old; None where the first update is the only one."""
    advantages: dict[str, list[float]] | None = None
    """A critic's; None without one."""
    returns: dict[str, list[float]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class StudentRank:
    """A Megatron student; see the module's text for how to call it."""

    def __init__(
        self,
        config: StudentConfig,
        objective: ObjectiveConfig,
        domains: Sequence[str],
        total_steps: int,
        temperature: float,
        valid_vocab: int,
        pad_id: int,
        rank: int = 0,
        world_size: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int = 0,
        seed: int = 0,
        epochs: int = 1,
        minibatches: int = 1,
        teacher_folders: Mapping[str, Path] | None = None,
    ) -> None:
        """Join the other ranks and load `config.model`.

        temperature: of the rollouts; the objective's logprobs are of softmax(logits / T).
        valid_vocab: ids the tokenizer knows; rows of the head beyond it take no part in the
            softmax (nor do the rows added so that tp divides the vocabulary).
        total_steps: where the learning-rate schedule ends.
        epochs, minibatches: `step` makes epochs * minibatches optimizer updates.
        teacher_folders: domain -> its teacher's checkpoint, for the signal `full`.
        Raises ConfigError for an impossible layout, ModelError for a checkpoint that does not fit;
        both before any weight is loaded.
        """
        torch.set_num_threads(config.threads_per_rank)
        cpu_platform.install()
        self.config, self.objective = config, objective
        self.domains = list(domains)
        self.total_steps, self.temperature, self.pad_id = total_steps, temperature, pad_id
        self.epochs, self.minibatches = epochs, minibatches
        self._teacher_folders = dict(teacher_folders or {})
        self.family, source = open_checkpoint(Path(config.model))
        if not 1 <= valid_vocab <= self.family.vocabulary:
            raise ModelError(
                f"{config.model}: the tokenizer has {valid_vocab} ids, the model's head "
                f"{self.family.vocabulary} rows; expected no more ids than rows."
            )
        self.valid_vocab = valid_vocab
        learning_rate(0, config.optimizer, total_steps)  # an unknown schedule is refused now
        parallel.check_layout(config.parallel, self.family, world_size)
        self._groups_before = parallel.start(
            config.parallel, rank, world_size, master_addr, master_port, seed
        )
        self.rank, self.device = rank, parallel.device()
        self._build(source)

    def _build(self, source: SafetensorsFolder) -> None:
        from megatron.core import parallel_state as ps
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        tp = self.config.parallel.tp
        self._rows_per_rank = -(-self.family.vocabulary // tp)
        self.model = model.build(self.family, self.config, self._rows_per_rank * tp)
        slots = model.slots(self.model, self.family)
        model.mark_experts(self.model, slots)
        self.frozen = model.freeze_routers(self.model) if self.config.freeze_routers else []
        self._replay = RoutingReplay(self.model) if self.config.routing_replay else None
        self.weights = ShardedWeights(
            slots,
            (ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()),
            (ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()),
        )
        self.weights.load(source, self._parameters())
        self._publisher: Publisher | None = None
        self._saving: checkpoint.BackgroundSave | None = None
        self._ddp = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=self.config.optimizer.distributed,
                overlap_grad_reduce=False,
                grad_reduce_in_fp32=True,
                average_in_collective=False,
            ),
            self.model,
        )
        self.model.config.finalize_model_grads_func = finalize_model_grads
        self._optimizer = Optimizer(
            self._ddp, self.config.optimizer, model.DTYPES[self.config.dtype]
        )
        self._last_stage = ps.is_pipeline_last_stage()
        self._head = self._loss_head(
            VocabularyShard(
                ps.get_tensor_model_parallel_rank() * self._rows_per_rank,
                ps.get_tensor_model_parallel_group(),
                self.config.kernel,
            )
        )
        self._dp, self._dp_rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
        # One rank of each data-parallel share speaks for it when results are added up.
        self._speaks = self._last_stage and ps.get_tensor_model_parallel_rank() == 0
        self._critic: Critic | None = None
        if self.objective.orm.estimator == "ppo_gae":
            self._critic = Critic(
                self.model.config.hidden_size,
                self.objective.orm,
                device=self.device,
                speaks=self._speaks,
            )
            if self._last_stage:
                self._critic.watch(self.model)

    def _loss_head(self, shard: VocabularyShard) -> LossHead:
        """Call after the DDP wrap: the last layer's weight is then where gradients are summed."""
        config, fused = self.config, self.config.loss_head == "fused"
        dtype = model.DTYPES[config.dtype]
        if self._last_stage and fused:
            output_head.emit_hidden_states(self.model)
        elif self._last_stage and config.fp32_head:
            output_head.emit_float32_logits(self.model)
        self._response_rows = (
            output_head.ResponseRows(self.model)
            if self._last_stage and config.parallel.tp == 1
            else None
        )
        teachers = None
        if self._last_stage and self.objective.teacher.signal == "full":
            teachers = TeacherModels(
                self._teacher_folders,
                dtype=dtype,
                device=self.device,
                vocab_start=shard.start,
                rows=self._rows_per_rank,
            )
        scorer = TokenScorer(
            shard,
            head_weight=output_head.head_weight(self.model) if fused else None,
            head_dtype=torch.float32 if config.fp32_head else None,
            keep_output=self.objective.teacher.signal != "sampled",
        )
        return LossHead(
            self.objective,
            self.domains,
            scorer,
            temperature=self.temperature,
            valid_vocab=self.valid_vocab,
            device=self.device,
            teachers=teachers,
        )

    # -- training -----------------------------------------------------------------------------

    def refusals(self, samples: Sequence[TrainSample]) -> dict[str, str]:
        """Sample id -> why `step` would refuse it; for the caller to drop and count."""
        reasons = batching.refusals(
            samples,
            self.valid_vocab,
            self.family.max_positions,
            self.domains,
            self.config.max_tokens_per_microbatch,
        )
        if self._replay is not None:
            config = self.model.config
            sizes = (config.num_layers, config.moe_router_topk, config.num_moe_experts)
            found = {s.sample_id: routing.refusal(s, *sizes) for s in samples}
            reasons = {k: v for k, v in found.items() if v} | reasons
        return reasons

    def step(self, samples: Sequence[TrainSample], step_index: int) -> dict[str, float]:
        """The optimizer updates of one step on `samples` (the whole step's, on every rank).

        `step_index` counts from 0. One update, or epochs * minibatches of them: the prompts are
        dealt to the minibatches, and pi_old is the student before the first update. An update
        without a token that counts (no samples, or all outside the truncation band) changes
        nothing: weights, moments and Adam's count stay as they are.
        Raises ModelError for samples in `refusals`, and for a loss or gradient that is not
        finite; that update is not made.
        """
        refused = self.refusals(samples)
        if refused:
            shown = "; ".join(f"{k}: {v}" for k, v in list(refused.items())[:5])
            raise ModelError(
                f"step {step_index}: {len(refused)} of {len(samples)} samples cannot be trained "
                f"on: {shown}. Drop them and count them (StudentRank.refusals)."
            )
        lr = learning_rate(step_index, self.config.optimizer, self.total_steps)
        parts = batching.updates(samples, self.epochs, self.minibatches)
        before = self._before(samples, len(parts))
        sums = torch.zeros(len(self.domains), len(SUM_COLUMNS), dtype=torch.float64)
        losses, norms = [], []
        for number, part in enumerate(parts, 1):
            where = f"step {step_index}"
            if len(parts) > 1:
                where += f", update {number} of {len(parts)}"
            loss, part_sums = self._forward_backward(part, before)
            if not math.isfinite(loss):
                raise ModelError(
                    f"{where}: the loss is {loss}; this update was not made. Look for extreme "
                    "teacher or sampler logprobs in the step's samples."
                )
            kept = float(part_sums[:, SUM_COLUMNS.index("kept")].sum())
            norms.append(self._optimizer.step(lr, where) if kept else 0.0)
            if self._critic is not None:
                (self._critic.step if kept else self._critic.forget)()
            losses.append(loss)
            sums += part_sums
        return {
            **summarise(sums, self.domains),
            "loss": sum(losses) / max(len(losses), 1),
            "grad_norm": sum(norms) / max(len(norms), 1),
            "lr": lr,
            "updates": float(len(parts)),
            **before.metrics,
        }

    def _before(self, samples: Sequence[TrainSample], updates: int) -> _Before:
        """What the updates of a step need from the student as it is before the first of them."""
        sequences = [(s.prompt_ids, s.response_ids) for s in samples]
        before = _Before()
        if updates > 1:
            values = self.logprobs(sequences, self.temperature, whole_head=False, samples=samples)
            before.old = {s.sample_id: v for s, v in zip(samples, values, strict=True)}
        if self._critic is not None:
            critic = self._critic
            values = self._per_token(sequences, lambda batch, _: critic.values(batch.rows), samples)
            before.advantages, before.returns, before.metrics = critic.advantages(samples, values)
        return before

    def _forward_backward(
        self, samples: Sequence[TrainSample], before: _Before | None = None
    ) -> tuple[float, Tensor]:
        """Fill the gradient buffers; returns the update's loss and domain sums, on all ranks.

        before: of the whole step; None for its only update, without a critic.
        """
        before = before or _Before()
        update = Update.of(samples, before.old, before.advantages)
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        sequences = [(s.prompt_ids, s.response_ids) for s in samples]
        plans = self._plan(sequences)
        total = torch.zeros(
            1 + len(self.domains) * len(SUM_COLUMNS), dtype=torch.float64, device=self.device
        )
        # Megatron divides the loss by the number of micro-batches and the gradients by dp; the
        # objective's denominator is the whole step's already.
        undo = len(plans) * self._dp

        def loss_of(batch: Microbatch, logits_BSV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss, sums = self._head.loss(batch.rows, batch.samples, logits_BSV, update)
            if self._critic is not None:
                returns_BR, mask_BR = batching.pad_responses(
                    [None if s is None else before.returns.get(s.sample_id) for s in batch.samples],
                    batch.rows.response_shape[1],
                    self.device,
                )
                self._critic.accumulate(batch.rows, returns_BR, mask_BR, update.totals.tokens)
            # A fresh tensor: the schedule divides in place what it is given.
            return loss * undo, {"total": torch.cat([loss.detach().double().view(1), sums])}

        for out in self._run(sequences, plans, samples, loss_of, forward_only=False):
            if self._speaks:
                total += out["total"]
        dist.all_reduce(total)
        total = total.cpu()
        return float(total[0]), total[1:].view(len(self.domains), len(SUM_COLUMNS))

    def _plan(self, sequences: microbatches.Sequences) -> list[planning.MicrobatchPlan]:
        return planning.plan([len(p) + len(r) - 1 for p, r in sequences], self._dp, self.config)

    def _run(
        self,
        sequences: microbatches.Sequences,
        plans: Sequence[planning.MicrobatchPlan],
        samples: Sequence[TrainSample] | None,
        on_logits: microbatches.OnLogits,
        forward_only: bool,
    ) -> list[dict[str, Tensor]]:
        """Megatron's schedule over this rank's share; what `on_logits` kept, on last stages."""
        return microbatches.run(
            self._ddp,
            plans,
            self._dp_rank,
            sequences,
            samples,
            on_logits,
            forward_only=forward_only,
            packing=self.config.packing,
            pad_id=self.pad_id,
            device=self.device,
            replay=self._replay,
            head=self._response_rows,
        )

    # -- reading ------------------------------------------------------------------------------

    def logprobs(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        temperature: float = 1.0,
        whole_head: bool = True,
        samples: Sequence[TrainSample] | None = None,
    ) -> list[list[float]]:
        """[R] logprobs of each (prompt, response)'s response ids under the current weights.

        samples: those the sequences are of, where their expert choices are to be replayed.

        whole_head: normalise over every row of the checkpoint's head, as an inference engine
            does; else over the tokenizer's ids, as training does.
        """
        vocabulary = self.family.vocabulary if whole_head else self.valid_vocab
        scorer = self._head.scorer
        return self._per_token(
            sequences,
            lambda batch, out: scorer.logprobs(batch.rows, out, temperature, vocabulary)[0],
            samples,
        )

    def _per_token(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        read: Callable[[Microbatch, Tensor], Tensor],
        samples: Sequence[TrainSample] | None = None,
    ) -> list[list[float]]:
        """[R] numbers of each sequence's response tokens: what `read` makes of each micro-batch's
        output, [N] in the order of its sequences, on the last stage."""
        offsets = [0]
        for _, response in sequences:
            offsets.append(offsets[-1] + len(response))
        plans = self._plan(sequences)
        values = torch.zeros(offsets[-1], dtype=torch.float32, device=self.device)

        def keep(batch: Microbatch, output_BSX: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return output_BSX.new_zeros(()), {"values": read(batch, output_BSX)}

        with torch.no_grad():
            outs = self._run(sequences, plans, samples, keep, forward_only=True)
        if self._speaks:
            for plan, out in zip(plans, outs, strict=True):
                mine = [i for i in plan.rows[self._dp_rank] if i is not None]
                places = [p for i in mine for p in range(offsets[i], offsets[i + 1])]
                values[torch.tensor(places, dtype=torch.long)] = out["values"]
        dist.all_reduce(values)
        flat = values.tolist()
        return [flat[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]

    def gradients(self) -> dict[str, Tensor] | None:
        """The last step's gradients before clipping, by Hugging Face name, on rank 0 (for
        checks; clipping scales them in place)."""
        return self.weights.collect(self._optimizer.gradients())

    def export(self, path: str | Path) -> dict[str, tuple[int, ...]]:
        """Write all weights as one Hugging Face safetensors file; returns name -> shape.

        The file appears whole or not at all. Rows added for tensor parallelism are not in it.
        Raises ModelError where it cannot be written.
        """
        # Not durable: it is read once and removed.
        return self.weights.write(self._parameters(), Path(path), durable=False)

    def publish(self, path: str | Path, transport: str) -> dict[str, int]:
        """Give the weights to whoever reads the safetensors file `path`; returns name -> sum of
        the words of each whole tensor as the ranks hold it.

        transport: `shared_memory`, the same file written in place each time by every rank;
            `file`, a new one that appears whole or not at all.
        Raises ModelError where it cannot be written.
        """
        publisher = self.publisher()
        if transport == "shared_memory":
            return publisher.share(Path(path))
        assert transport == "file", transport
        return publisher.write(Path(path))

    def publisher(self) -> Publisher:
        """Made at the first call, of all ranks at once."""
        if self._publisher is None:
            self._publisher = Publisher(self.weights, self._parameters())
        return self._publisher

    def save_hf(self, directory: str | Path) -> None:
        """Write a folder that AutoModelForCausalLM and AutoTokenizer load: the weights, and the
        source checkpoint's config and tokenizer files. Rows of the head past the tokenizer are
        made unlikely (`save_hf.without_padding_tokens`)."""
        directory = Path(directory)

        parallel.on_rank_zero(
            lambda: copy_settings(Path(self.config.model), directory, self.config.dtype),
            f"could not write the student to {directory}",
        )
        head = "model.embed_tokens.weight" if self.family.tied else "lm_head.weight"
        self.weights.write(
            self._parameters(),
            directory / checkpoint.WEIGHTS,
            change=without_padding_tokens(head, self.valid_vocab),
        )

    # -- checkpoints --------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """Write everything the student needs to go on from here (`mopd.student.checkpoint`)."""
        checkpoint.save(
            Path(directory),
            self.weights,
            self._optimizer,
            self._main_parameters(),
            self._identity(),
            {} if self._critic is None else {CRITIC: self._critic.state_dict()},
            megatron=self.model if self.config.checkpoint_format == "megatron" else None,
        )

    def begin_save(self, directory: str | Path) -> None:
        """`save` in Megatron's format, but return once what is saved has been copied; it is written
        beside the steps that follow, and there after `finish_save`."""
        assert self._saving is None and self.config.checkpoint_format == "megatron"
        self._saving = checkpoint.BackgroundSave(
            Path(directory),
            self._optimizer,
            self._main_parameters(),
            self._identity(),
            {} if self._critic is None else {CRITIC: self._critic.state_dict()},
            self.model,
            [*self._parameters().values(), *self._optimizer.state_tensors()],
        )

    def save_written(self) -> bool:
        """Whether this rank has nothing left to write. Not collective."""
        return self._saving is None or self._saving.written()

    def finish_save(self) -> float:
        """Wait for what `begin_save` began; returns the seconds that the slowest rank wrote.

        Raises ModelError where a rank could not write; the checkpoint before is whole.
        """
        saving, self._saving = self._saving, None
        assert saving is not None
        return saving.finish()

    def load(self, directory: str | Path) -> None:
        """Go on from what `save` wrote, at this or any other layout."""
        checkpoint.load(
            Path(directory),
            self.weights,
            self._optimizer,
            self._main_parameters(),
            self._identity(),
            self.family.shapes(),
            self.model,
        )
        if self._critic is not None:
            try:
                state = load_file(Path(directory) / CRITIC)
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{directory}: its {CRITIC} cannot be read ({error}); the objective has a "
                    "critic. Resume with the objective it was written with."
                ) from error
            self._critic.load_state_dict(state)

    # -- small helpers ------------------------------------------------------------------------

    def _parameters(self) -> dict[str, Tensor]:
        return model.state(self.model)

    def _main_parameters(self) -> dict[str, Tensor]:
        """All parameters, the trained ones in the precision the optimizer keeps them."""
        return self._parameters() | self._optimizer.main_parameters()

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be gone on from."""
        return {
            "model_type": self.family.hf.model_type,
            "frozen_routers": self.config.freeze_routers,
            "critic": self._critic is not None,
        }

    def close(self) -> None:
        """Leave the process groups; the object cannot be used afterwards."""
        parallel.stop(self._groups_before)
        # Gradient hooks in C++, which the garbage collector cannot see, keep Megatron's wrapper and
        # through it the groups with their sockets and threads.
        self._ddp.__dict__.clear()
        self.__dict__.clear()
        gc.collect()
