"""Megatron's schedule over planned micro-batches: forwards, and backwards where asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mopd.student import batching
from mopd.student.attention import packed_sequences
from mopd.student.output_head import ResponseRows
from mopd.student.planning import MicrobatchPlan
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


OnLogits = Callable[[Microbatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, [B, S, V] logits) -> (loss to differentiate, what to keep), on the last stage."""


def run(
    ddp: Any,
    plans: Sequence[MicrobatchPlan],
    dp_rank: int,
    sequences: Sequences,
    samples: Sequence[TrainSample] | None,
    on_logits: OnLogits,
    *,
    forward_only: bool,
    packing: bool,
    pad_id: int,
    device: torch.device,
    replay: RoutingReplay | None,
    head: ResponseRows | None,
) -> list[dict[str, Tensor]]:
    """What `on_logits` kept of each micro-batch of this rank; empty but on the last stage.

    Gradients add up in the buffers of `ddp`, Megatron's wrapper of the model. `replay`: send the
    tokens of `samples` where their rollout sent them. `head`: leave it the response tokens.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if not plans:
        return []

    def batches() -> Iterator[Microbatch]:
        build = batching.build_packed_row if packing else batching.build_rows
        for plan in plans:
            mine = plan.rows[dp_rank]
            rows = build(
                [None if i is None else sequences[i] for i in mine],
                plan.lengths[dp_rank],
                pad_id,
                device,
            )
            known = tuple(None if i is None or samples is None else samples[i] for i in mine)
            yield Microbatch(replace(rows, gathered=head is not None), known)

    def forward(iterator: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        rows = batch.rows
        packed = packed_sequences(rows.segments, device) if rows.segments else None
        if replay is not None and samples is not None:
            replay.set(batch.samples, rows.input_ids_BS.shape[1], packing, device)
        if head is not None:
            head.rows = rows
        # No mask: attention is causal, and a padded token comes after every real one of its row.
        output = model(rows.input_ids_BS, rows.position_ids_BS, None, packed_seq_params=packed)
        return output, lambda logits_BSV: on_logits(batch, logits_BSV)

    outputs = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches(),
        model=[ddp],
        num_microbatches=len(plans),
        # Unused: stages tell each other the shapes (variable_seq_lengths).
        seq_length=max(plans[0].lengths),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if replay is not None:
        replay.clear()
    if head is not None:
        head.rows = None
    return outputs
