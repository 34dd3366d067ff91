"""The head of the response tokens alone gives the rows that the whole sequences' logits have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.student.batching import Rows, build_packed_row, build_rows
from mopd.student.output_head import ResponseRows

HIDDEN, VOCAB = 6, 11
SEQUENCES = [((1, 2, 3), (4, 5)), None, ((6,), (7, 8, 9)), ((1, 1), (2,))]


def whole_numbers(*shape: int) -> Tensor:
    """Products and sums of them are exact, in any order."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(0)).float()


class Head:
    """Megatron's last layer: [S, B, H] -> ([S, B, V], bias)."""

    def __init__(self) -> None:
        self.weight = whole_numbers(VOCAB, HIDDEN)

    def forward(self, hidden: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
        return hidden @ (self.weight if weight is None else weight).t(), None


def model() -> tuple[Any, ResponseRows]:
    built = SimpleNamespace(output_layer=Head())
    return built, ResponseRows(built)


def rows_of(packed: bool) -> Rows:
    device = torch.device("cpu")
    if packed:
        return build_packed_row(SEQUENCES, 12, 0, device)
    return build_rows(SEQUENCES, 5, 0, device)


@pytest.mark.parametrize("packed", [False, True])
def test_response_rows_in_order(packed: bool) -> None:
    built, head = model()
    rows = rows_of(packed)
    b, s = rows.input_ids_BS.shape
    hidden = whole_numbers(s, b, HIDDEN)
    whole, _ = built.output_layer.forward(hidden)
    assert whole.shape == (s, b, VOCAB)  # off
    head.rows = rows
    some, _ = built.output_layer.forward(hidden)
    expected = whole[rows.position_N, rows.row_N]
    assert some.shape == (6, 1, VOCAB) and some[:, 0].equal(expected)
    # Batch first, as the model returns it, each token where `Rows` says.
    gathered = Rows(**{**rows.__dict__, "gathered": True})
    for which, out in ((rows, whole), (gathered, some)):
        out_BSV = out.transpose(0, 1)
        flat = out_BSV.reshape(-1, VOCAB)
        assert flat[which.output_place_N(out_BSV.shape[1])].equal(expected)


def test_padding_alone_still_has_an_output() -> None:
    built, head = model()
    head.rows = build_rows([None], 3, 0, torch.device("cpu"))
    hidden = torch.ones(3, 1, HIDDEN, requires_grad=True)
    out, _ = built.output_layer.forward(hidden)
    assert out.shape == (1, 1, VOCAB)
    (out * 0).sum().backward()
    assert hidden.grad is not None and hidden.grad.eq(0).all()


def test_a_tied_head_is_passed_on() -> None:
    built, head = model()
    head.rows = rows_of(packed=False)
    weight = torch.zeros(VOCAB, HIDDEN)
    out, _ = built.output_layer.forward(torch.ones(5, 4, HIDDEN), weight=weight)
    assert out.eq(0).all()
