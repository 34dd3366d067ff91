"""The optimizer updates of one step: losses, gradients, Adam, a critic's part.

Every method is collective: all ranks call it with the whole step's samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.errors import ModelError
from mopd.objective.stats import SUM_COLUMNS, summarise
from mopd.student import batching
from mopd.student.forwards import Microbatch
from mopd.student.loss_head import Update
from mopd.student.parts import Parts, Setting
from mopd.student.schedule import learning_rate
from mopd.types import TrainSample


@dataclass
class Before:
    """Of a step, before its first update, by sample id; [R] each."""

    old: dict[str, list[float]] | None = None
    """log pi_old; None where the first update is the only one."""
    advantages: dict[str, list[float]] | None = None
    """A critic's; None without one."""
    returns: dict[str, list[float]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Updates:
    """See the module's text."""

    def __init__(
        self, setting: Setting, parts: Parts, *, total_steps: int, epochs: int, minibatches: int
    ) -> None:
        """total_steps: where the learning-rate schedule ends."""
        self._setting, self._parts = setting, parts
        self._total_steps, self._epochs, self._minibatches = total_steps, epochs, minibatches

    def step(self, samples: Sequence[TrainSample], step_index: int) -> dict[str, float]:
        """See `StudentRank.step`; the samples are such as can be trained on."""
        optimizer, critic = self._parts.optimizer, self._parts.critic
        biases = self._parts.biases
        domains = self._setting.domains
        lr = learning_rate(step_index, self._setting.config.optimizer, self._total_steps)
        parts = batching.updates(samples, self._epochs, self._minibatches)
        before = self._before(samples, len(parts))
        sums = torch.zeros(len(domains), len(SUM_COLUMNS), dtype=torch.float64)
        losses, norms = [], []
        for number, part in enumerate(parts, 1):
            where = f"step {step_index}"
            if len(parts) > 1:
                where += f", update {number} of {len(parts)}"
            loss, part_sums = self.forward_backward(part, before)
            if not math.isfinite(loss):
                raise ModelError(
                    f"{where}: the loss is {loss}; this update was not made. Look for extreme "
                    "teacher or sampler logprobs in the step's samples."
                )
            kept = float(part_sums[:, SUM_COLUMNS.index("kept")].sum())
            norms.append(optimizer.step(lr, where) if kept else 0.0)
            if critic is not None:
                (critic.step if kept else critic.forget)()
            if biases is not None and kept:
                biases.update()
            losses.append(loss)
            sums += part_sums
        return {
            **summarise(sums, domains),
            "loss": sum(losses) / max(len(losses), 1),
            "grad_norm": sum(norms) / max(len(norms), 1),
            "lr": lr,
            "updates": float(len(parts)),
            **before.metrics,
        }

    def _before(self, samples: Sequence[TrainSample], updates: int) -> Before:
        """What the updates of a step need from the student as it is before the first of them."""
        sequences = [(s.prompt_ids, s.response_ids) for s in samples]
        before = Before()
        if updates > 1:
            setting = self._setting
            values = self._parts.logprobs(
                sequences, setting.temperature, setting.valid_vocab, samples
            )
            before.old = {s.sample_id: v for s, v in zip(samples, values, strict=True)}
        critic = self._parts.critic
        if critic is not None:
            values = self._parts.forwards.per_token(
                sequences, lambda batch, _: critic.values(batch.rows), samples
            )
            before.advantages, before.returns, before.metrics = critic.advantages(samples, values)
        return before

    def forward_backward(
        self, samples: Sequence[TrainSample], before: Before | None = None
    ) -> tuple[float, Tensor]:
        """Fill the gradient buffers; returns the update's loss and domain sums, on all ranks.

        before: of the whole step; None for its only update, without a critic.
        """
        before = before or Before()
        setting, parts = self._setting, self._parts
        domains, critic, forwards = setting.domains, parts.critic, parts.forwards
        update = Update.of(samples, before.old, before.advantages)
        parts.ddp.zero_grad_buffer()
        parts.optimizer.zero_grad()
        if parts.biases is not None:
            parts.biases.forget()  # what an update that was not made has left
        sequences = [(s.prompt_ids, s.response_ids) for s in samples]
        plans = forwards.plan(sequences)
        total = torch.zeros(
            1 + len(domains) * len(SUM_COLUMNS), dtype=torch.float64, device=setting.device
        )
        # Megatron divides the loss by the number of micro-batches and the gradients by dp; the
        # objective's denominator is the whole step's already.
        undo = len(plans) * forwards.dp

        def loss_of(batch: Microbatch, logits_BSV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss, sums = parts.head.loss(batch.rows, batch.samples, logits_BSV, update)
            if critic is not None:
                returns_BR, mask_BR = batching.pad_responses(
                    [None if s is None else before.returns.get(s.sample_id) for s in batch.samples],
                    batch.rows.response_shape[1],
                    setting.device,
                )
                critic.accumulate(batch.rows, returns_BR, mask_BR, update.totals.tokens)
            # A fresh tensor: the schedule divides in place what it is given.
            return loss * undo, {"total": torch.cat([loss.detach().double().view(1), sums])}

        for out in forwards.run(sequences, plans, samples, loss_of, forward_only=False):
            if forwards.speaks:
                total += out["total"]
        dist.all_reduce(total)
        total = total.cpu()
        return float(total[0]), total[1:].view(len(domains), len(SUM_COLUMNS))
