"""The model's last layer, where it is not Megatron's own.

`student.loss_head: fused` leaves it out: the loss takes the LM head tile by tile
(`mopd.kernels.fused_head`), and no tensor of the vocabulary's width is ever made.
`student.fp32_head` makes its logits in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mopd.student.batching import Rows


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


class ResponseRows:
    """The last layer, of the response tokens alone: a prompt's logits are nobody's.

    Call after the other changes to the layer. Not with tensor parallelism, whose last layer first
    puts the sequence together from the ranks' parts.
    """

    def __init__(self, model: Any) -> None:
        """Megatron's model of a last stage; off until `rows` is set, so that it gives all logits to
        whoever calls it directly."""
        self.rows: Rows | None = None
        layer = model.output_layer
        self._forward = layer.forward
        layer.forward = self._select

    def _select(self, hidden_SBH: Tensor, *arguments: Any, **named: Any) -> Any:
        if self.rows is not None:
            s, b, width = hidden_SBH.shape
            place_N = self.rows.position_N * b + self.rows.row_N
            if not len(place_N):  # a micro-batch of padding still has its backward pass
                place_N = place_N.new_zeros(1)
            # As [N, 1, H]: one row of N positions, which Megatron then puts batch first.
            hidden_SBH = hidden_SBH.reshape(s * b, width).index_select(0, place_N).unsqueeze(1)
        return self._forward(hidden_SBH, *arguments, **named)


def head_weight(model: Any) -> Callable[[], Tensor]:
    """The LM head's rows on this rank, [V, H]: its own, or the embedding's where they are tied."""
    return lambda: (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
