"""One rank's forwards, and backwards where asked for: planned, and run by Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.config.schema import StudentConfig
from mopd.student import batching, planning
from mopd.student.attention import packed_sequences
from mopd.student.expert_bias import ExpertBiases
from mopd.student.output_head import ResponseRows
from mopd.student.routing import RoutingReplay
from mopd.types import TrainSample

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt ids, response ids) pairs."""


@dataclass(frozen=True)
class Microbatch:
    """This rank's part of one micro-batch."""

    rows: batching.Rows
    samples: tuple[TrainSample | None, ...]
    """[B]; all None when only logprobs are wanted."""
    lengths: tuple[int, ...]
    """[B] input positions of each sequence; 0 for a row of padding."""


OnLogits = Callable[[Microbatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, [B, S, V] logits) -> (loss to differentiate, what to keep), on the last stage."""


@dataclass(frozen=True)
class Forwards:
    """Every method but `plan` is collective."""

    ddp: Any
    """Megatron's wrapper of the model; gradients add up in its buffers."""
    config: StudentConfig
    pad_id: int
    device: torch.device
    dp: int
    dp_rank: int
    speaks: bool
    """One rank of each data-parallel share speaks for it when results are added up."""
    replay: RoutingReplay | None
    """Sends the tokens of samples where their rollout sent them."""
    biases: ExpertBiases | None
    """Counts where tokens go in training."""
    head: ResponseRows | None
    """The LM head, to be left the response tokens."""

    def plan(self, sequences: Sequences) -> list[planning.MicrobatchPlan]:
        """The same on every rank."""
        return planning.plan([len(p) + len(r) - 1 for p, r in sequences], self.dp, self.config)

    def run(
        self,
        sequences: Sequences,
        plans: Sequence[planning.MicrobatchPlan],
        samples: Sequence[TrainSample] | None,
        on_logits: OnLogits,
        *,
        forward_only: bool,
    ) -> list[dict[str, Tensor]]:
        """What `on_logits` kept of each micro-batch of this rank; empty but on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not plans:
            return []
        packing, replay, head = self.config.packing, self.replay, self.head
        biases = None if forward_only else self.biases

        def forward(iterator: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(iterator)
            rows = batch.rows
            packed = packed_sequences(rows.segments, self.device) if rows.segments else None
            if replay is not None and samples is not None:
                replay.set(batch.samples, rows.input_ids_BS.shape[1], packing, self.device)
            if biases is not None:
                biases.set(batch.lengths, rows.input_ids_BS.shape[1], packing, self.device)
            if head is not None:
                head.rows = rows
            # No mask: attention is causal, and a padded token comes after every real one of its
            # row.
            output = model(rows.input_ids_BS, rows.position_ids_BS, None, packed_seq_params=packed)
            return output, lambda logits_BSV: on_logits(batch, logits_BSV)

        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=self._batches(sequences, plans, samples),
            model=[self.ddp],
            num_microbatches=len(plans),
            # Unused: stages tell each other the shapes (variable_seq_lengths).
            seq_length=max(plans[0].lengths),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if replay is not None:
            replay.clear()
        if biases is not None:
            biases.clear()
        if head is not None:
            head.rows = None
        return outputs  # type: ignore[no-any-return]

    def _batches(
        self,
        sequences: Sequences,
        plans: Sequence[planning.MicrobatchPlan],
        samples: Sequence[TrainSample] | None,
    ) -> Iterator[Microbatch]:
        build = batching.build_packed_row if self.config.packing else batching.build_rows
        for plan in plans:
            mine = plan.rows[self.dp_rank]
            own = [None if i is None else sequences[i] for i in mine]
            rows = build(
                own,
                plan.lengths[self.dp_rank],
                self.pad_id,
                self.device,
            )
            known = tuple(None if i is None or samples is None else samples[i] for i in mine)
            lengths = tuple(0 if s is None else len(s[0]) + len(s[1]) - 1 for s in own)
            yield Microbatch(replace(rows, gathered=self.head is not None), known, lengths)

    def per_token(
        self,
        sequences: Sequences,
        read: Callable[[Microbatch, Tensor], Tensor],
        samples: Sequence[TrainSample] | None = None,
    ) -> list[list[float]]:
        """[R] numbers of each sequence's response tokens: what `read` makes of each micro-batch's
        output, [N] in the order of its sequences, on the last stage. No gradients.

        samples: those the sequences are of, where their expert choices are to be replayed.
        """
        offsets = [0]
        for _, response in sequences:
            offsets.append(offsets[-1] + len(response))
        plans = self.plan(sequences)
        values = torch.zeros(offsets[-1], dtype=torch.float32, device=self.device)

        def keep(batch: Microbatch, output_BSX: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return output_BSX.new_zeros(()), {"values": read(batch, output_BSX)}

        with torch.no_grad():
            outs = self.run(sequences, plans, samples, keep, forward_only=True)
        if self.speaks:
            for plan, out in zip(plans, outs, strict=True):
                mine = [i for i in plan.rows[self.dp_rank] if i is not None]
                places = [p for i in mine for p in range(offsets[i], offsets[i + 1])]
                values[torch.tensor(places, dtype=torch.long)] = out["values"]
        dist.all_reduce(values)
        flat = values.tolist()
        return [flat[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]
