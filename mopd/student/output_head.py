"""The model's last layer, where it is not Megatron's own.

`student.loss_head: fused` leaves it out: the loss takes the LM head tile by tile
(`mopd.kernels.fused_head`), and no tensor of the vocabulary's width is ever made.
`student.fp32_head` makes its logits in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def emit_hidden_states(model: Any) -> None:
    """Make the last pipeline stage return [B, S, H] hidden states, of the whole sequence.

    The gradient of what it returns is to be each tensor-parallel rank's own part; Megatron's
    gather sums the parts on its way back.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    layer = model.output_layer

    def forward(
        hidden_SBH: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        if layer.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH)
        return hidden_SBH, None

    layer.forward = forward


def emit_float32_logits(model: Any) -> None:
    """Make the last layer's product and its logits float32, whatever the weights are kept in.

    MiniMax-M1 (arXiv 2506.13585): most of the difference between the probabilities of training and
    rollout engine came from the head's precision.
    """
    layer = model.output_layer
    forward = layer.forward

    def in_float32(hidden: Tensor, weight: Tensor | None = None, **named: Any) -> Any:
        weight = layer.weight if weight is None else weight
        return forward(hidden.float(), weight=weight.float(), **named)

    layer.forward = in_float32


def head_weight(model: Any) -> Callable[[], Tensor]:
    """The LM head's rows on this rank, [V, H]: its own, or the embedding's where they are tied."""
    return lambda: (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
