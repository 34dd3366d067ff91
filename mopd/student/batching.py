"""From the sequences of a micro-batch to tensors, and samples that cannot be trained on. Pure.

Legend: B rows of a micro-batch on one rank, S positions, R response positions, N response tokens.
Prompt [p0 p1 p2] and response [r0 r1] become one right-padded row of inputs and a gather:

    inputs   p0 p1 p2 r0 (pad)          the last token is never an input: nothing is predicted
    targets        r0 r1                from it; r_k is predicted at position P - 1 + k
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.types import TrainSample, group_of


def updates(
    samples: Sequence[TrainSample], epochs: int, minibatches: int
) -> list[list[TrainSample]]:
    """The samples of each optimizer update of a step: `epochs` passes over `minibatches` parts.

    A prompt's samples stay together, in parts as even as they can be; a part without a prompt is
    left out, so that there may be fewer. Without samples: one update of nothing.
    """
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(group_of(sample.sample_id), []).append(sample)
    listed = list(groups.values())
    bounds = [len(listed) * i // minibatches for i in range(minibatches + 1)]
    parts = [
        [sample for group in listed[a:b] for sample in group]
        for a, b in zip(bounds, bounds[1:], strict=False)
        if b > a
    ]
    return (parts or [[]]) * epochs


@dataclass(frozen=True)
class Rows:
    """The tensors of one micro-batch on one rank that the forward pass needs."""

    input_ids_BS: Tensor
    position_ids_BS: Tensor
    row_N: Tensor
    """Row of each response token in the logits."""
    position_N: Tensor
    """Position in the row of the logits that predict it."""
    target_N: Tensor
    place_N: Tensor
    """Its place in a flattened [B, R]."""
    response_shape: tuple[int, int]
    """(B, R), B counting sequences: one a row, or many in one row."""
    segments: tuple[int, ...] | None = None
    """Lengths of the sequences that lie end to end in the one row; None where each has its own."""
    gathered: bool = False
    """Whether the model's output has the response tokens alone, in order, instead of [B, S]."""

    def output_place_N(self, width: int) -> Tensor:
        """Row of each response token in the output, flattened to two dimensions; `width`: its S."""
        if self.gathered:
            return torch.arange(len(self.target_N), device=self.target_N.device)
        return self.row_N * width + self.position_N

    def spread(self, values_N: Tensor) -> Tensor:
        """[N] values of response tokens -> [B, R], 0 elsewhere; differentiable."""
        b, r = self.response_shape
        return values_N.new_zeros(b * r).index_put((self.place_N,), values_N).view(b, r)


def build_rows(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]] | None],
    length: int,
    pad_id: int,
    device: torch.device,
) -> Rows:
    """Tensors for rows of (prompt ids, response ids); None is a row of padding."""
    b = len(sequences)
    r = max((len(s[1]) for s in sequences if s is not None), default=0)
    ids = [[pad_id] * length for _ in range(b)]
    row: list[int] = []
    position: list[int] = []
    target: list[int] = []
    place: list[int] = []
    for i, sequence in enumerate(sequences):
        if sequence is None:
            continue
        prompt, response = sequence
        inputs = [*prompt, *response][:-1]
        ids[i][: len(inputs)] = inputs
        row += [i] * len(response)
        position += range(len(prompt) - 1, len(prompt) - 1 + len(response))
        target += response
        place += range(i * r, i * r + len(response))

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return Rows(
        input_ids_BS=torch.tensor(ids, dtype=torch.long, device=device).view(b, length),
        position_ids_BS=torch.arange(length, device=device).expand(b, -1),
        row_N=tensor(row),
        position_N=tensor(position),
        target_N=tensor(target),
        place_N=tensor(place),
        response_shape=(b, r),
    )


def build_packed_row(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]] | None],
    length: int,
    pad_id: int,
    device: torch.device,
) -> Rows:
    """Tensors for (prompt ids, response ids) end to end in one row of `length` positions.

    None takes no room. What is left of the row is a segment of padding of its own.
    """
    ids: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    place: list[int] = []
    predicts: list[int] = []
    target: list[int] = []
    r = max((len(s[1]) for s in sequences if s is not None), default=0)
    for i, sequence in enumerate(sequences):
        if sequence is None:
            continue
        prompt, response = sequence
        start = len(ids)
        ids += [*prompt, *response][:-1]
        segments.append(len(ids) - start)
        positions += range(segments[-1])
        first = start + len(prompt) - 1
        predicts += range(first, first + len(response))
        target += response
        place += range(i * r, i * r + len(response))
    if len(ids) < length:
        segments.append(length - len(ids))
        positions += range(segments[-1])
        ids += [pad_id] * segments[-1]
    assert len(ids) == length, (len(ids), length)

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return Rows(
        input_ids_BS=tensor(ids).unsqueeze(0),
        position_ids_BS=tensor(positions).unsqueeze(0),
        row_N=torch.zeros(len(target), dtype=torch.long, device=device),
        position_N=tensor(predicts),
        target_N=tensor(target),
        place_N=tensor(place),
        response_shape=(len(sequences), r),
        segments=tuple(segments),
    )


def pad_responses(
    values: Sequence[Sequence[float] | None], width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """[B, R] float32 values, and the mask of where there are any."""
    out = torch.zeros(len(values), width)
    mask = torch.zeros(len(values), width, dtype=torch.bool)
    for i, row in enumerate(values):
        if row is not None:
            out[i, : len(row)] = torch.tensor(row, dtype=torch.float32)
            mask[i, : len(row)] = True
    return out.to(device), mask.to(device)


def refusals(
    samples: Sequence[TrainSample],
    valid_vocab: int,
    max_positions: int,
    domains: Sequence[str],
    max_tokens: int | None = None,
) -> dict[str, str]:
    """Sample id -> why the student cannot train on it. Drop and count those; keep the rest.

    Catches ids that no tokenizer knows (rows of the head that exist only as padding), scores that
    do not line up with the response, and scores that are not numbers.
    """
    known = set(domains)
    seen: set[str] = set()
    out: dict[str, str] = {}
    for sample in samples:
        reason = _refusal(sample, valid_vocab, max_positions, known)
        inputs = len(sample.prompt_ids) + len(sample.response_ids) - 1
        if max_tokens is not None and inputs > max_tokens:
            reason = f"{inputs} input tokens; student.max_tokens_per_microbatch is {max_tokens}"
        if sample.sample_id in seen:
            reason = "its id occurs twice in the step"
        seen.add(sample.sample_id)
        if reason:
            out[sample.sample_id] = reason
    return out


def _refusal(
    sample: TrainSample, valid_vocab: int, max_positions: int, domains: set[str]
) -> str | None:
    if sample.domain not in domains:
        return f"domain {sample.domain!r} is none of {', '.join(sorted(domains))}"
    if not sample.prompt_ids or not sample.response_ids:
        return (
            f"{len(sample.prompt_ids)} prompt and {len(sample.response_ids)} response ids; "
            "expected at least one of each"
        )
    total = len(sample.prompt_ids) + len(sample.response_ids)
    if total > max_positions:
        return f"{total} tokens; the model's context is {max_positions}"
    for name, ids in (("prompt", sample.prompt_ids), ("response", sample.response_ids)):
        bad = next((i for i in ids if not 0 <= i < valid_vocab), None)
        if bad is not None:
            return f"{name} id {bad} is outside the vocabulary of {valid_vocab}"
    for name, scores in (
        ("sampler_logprobs", sample.sampler_logprobs),
        ("teacher_logprobs", sample.teacher_logprobs),
        ("reference_logprobs", sample.reference_logprobs),
    ):
        if scores is None:
            continue
        if len(scores) != len(sample.response_ids):
            return f"{len(scores)} {name} for {len(sample.response_ids)} response ids"
        if not all(map(math.isfinite, scores)):
            return f"{name} holds a value that is not finite"
    if not math.isfinite(sample.orm_advantage):
        return f"orm_advantage is {sample.orm_advantage}"
    return None
