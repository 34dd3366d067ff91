"""What the student says of the response tokens, from the last stage's output.

The output is logits, or hidden states where the LM head is left to the loss (`head_weight`); of
every position, or of the response tokens alone (`Rows.gathered`: then B is 1 and S is N).
Legend: B rows, S positions, N response tokens, M = B * S, V columns of this rank's vocabulary
shard, X = V or H, K candidates a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mopd.config.objective import TeacherSignalConfig
from mopd.kernels.buckets import UNUSED
from mopd.kernels.reference import IGNORE
from mopd.kernels.select import (
    Head,
    full_divergence,
    fused_head_logprobs,
    gathered_logprobs,
    topk_divergence,
    topk_logprobs,
)
from mopd.objective_names import JSD_BETA
from mopd.student.batching import Rows
from mopd.student.teacher_models import TeacherModels
from mopd.types import TopK, TrainSample


@dataclass(frozen=True)
class VocabularyShard:
    """Which ids a rank's columns stand for, and who computes on them."""

    start: int
    group: dist.ProcessGroup | None
    """The ranks with the other shards."""
    backend: str
    """student.kernel."""


class TokenScorer:
    """Reads the response tokens' numbers out of a micro-batch's output."""

    def __init__(
        self,
        shard: VocabularyShard,
        *,
        head_weight: Callable[[], Tensor] | None,
        head_dtype: torch.dtype | None,
        keep_output: bool,
    ) -> None:
        """
        head_weight: gives the LM head's [V, H] shard where the output is hidden states.
        head_dtype: of the logits made from them; None: the weights'.
        keep_output: the logits are read again after the logprobs' backward, so that their
            gradient cannot be written over them.
        """
        self._shard, self._head_weight = shard, head_weight
        self._head_dtype, self._keep_output = head_dtype, keep_output

    def logprobs(
        self, rows: Rows, output_BSX: Tensor, temperature: float, valid_vocab: int
    ) -> tuple[Tensor, Tensor]:
        """([N] logprobs of the response tokens, [N] entropies), nats, float32."""
        options = self._options(temperature, valid_vocab)
        output_MX = output_BSX.reshape(-1, output_BSX.shape[-1])
        place_N = _place(rows, output_BSX)
        if self._head_weight is not None:
            return fused_head_logprobs(
                output_MX[: len(place_N)] if rows.gathered else output_MX[place_N],
                self._head_weight(),
                rows.target_N,
                return_entropy=True,
                logits_dtype=self._head_dtype,
                reduce_hidden_grad=False,  # Megatron's gather of the sequence does
                **options,
            )
        # Every row in place, the prompts' ignored where there are any: selecting the response rows
        # of the logits would copy them, and its backward would make a second tensor as large.
        target_M = torch.full((len(output_MX),), IGNORE, device=output_MX.device)
        target_M[place_N] = rows.target_N
        logprobs_M, entropy_M = gathered_logprobs(
            output_MX,
            target_M,
            inplace_backward=not self._keep_output,
            return_entropy=True,
            **options,
        )
        return logprobs_M[place_N], entropy_M[place_N]

    def topk_divergence(
        self,
        rows: Rows,
        samples: Sequence[TrainSample],
        logits_BSV: Tensor,
        teacher: TeacherSignalConfig,
        temperature: float,
        valid_vocab: int,
    ) -> Tensor:
        """[N] divergences from each teacher's top-k with a tail, differentiable, nats."""
        ids_NK, logprobs_NK = _teacher_candidates(samples, logits_BSV.device)
        divergence_M = topk_divergence(
            logits_BSV.reshape(-1, logits_BSV.shape[-1]),
            _in_place(rows, ids_NK, logits_BSV, UNUSED),
            _in_place(rows, logprobs_NK, logits_BSV, 0.0),
            direction=teacher.direction,
            beta=_beta(teacher),
            **self._options(temperature, valid_vocab),
        )
        return divergence_M[_place(rows, logits_BSV)]

    def full_divergence(
        self,
        rows: Rows,
        samples: Sequence[TrainSample],
        output_BSX: Tensor,
        models: TeacherModels,
        teacher: TeacherSignalConfig,
        temperature: float,
        valid_vocab: int,
    ) -> Tensor:
        """[N] divergences from each teacher over the whole vocabulary, differentiable, nats."""
        output_NX = output_BSX.reshape(-1, output_BSX.shape[-1])[_place(rows, output_BSX)]
        total_N = output_NX.new_zeros(len(output_NX), dtype=torch.float32)
        for place_n, head in models.heads(samples):
            own_nX = output_NX[place_n]
            student: Tensor | Head = own_nX
            if self._head_weight is not None:
                student = Head(own_nX, self._head_weight(), self._head_dtype)
            divergence_n = full_divergence(
                student,
                head,
                direction=teacher.direction,
                beta=_beta(teacher),
                reduce_hidden_grad=False,
                **self._options(temperature, valid_vocab),
            )
            total_N = total_N.index_put((place_n,), divergence_n.to(total_N.dtype))
        return total_N

    def sampler_topk(
        self,
        rows: Rows,
        samples: Sequence[TrainSample],
        logits_BSV: Tensor,
        temperature: float,
        valid_vocab: int,
    ) -> tuple[Tensor, Tensor]:
        """[B, R, K] logprobs of student and sampler on the sampler's top-k, detached; -inf where
        a slot, or a position, has no id."""
        topks = [s.sampler_topk for s in samples]
        width = max((t.ids.shape[1] for t in topks if t is not None), default=1)
        ids_NK, sampler_NK = _stacked(topks, width, logits_BSV.device)
        student_MK = topk_logprobs(
            logits_BSV.reshape(-1, logits_BSV.shape[-1]),
            _in_place(rows, ids_NK, logits_BSV, UNUSED),
            **self._options(temperature, valid_vocab),
        )
        student_NK = student_MK[_place(rows, logits_BSV)].float()
        b, r = rows.response_shape

        def spread(values_NK: Tensor) -> Tensor:
            out = values_NK.new_full((b * r, width), -torch.inf)
            out[rows.place_N] = values_NK.masked_fill(ids_NK == UNUSED, -torch.inf)
            return out.view(b, r, width)

        return spread(student_NK), spread(sampler_NK)

    def _options(self, temperature: float, valid_vocab: int) -> dict:  # type: ignore[type-arg]
        return {
            "temperature": temperature,
            "valid_vocab": valid_vocab,
            "vocab_start": self._shard.start,
            "group": self._shard.group,
            "backend": self._shard.backend,
        }


def _beta(teacher: TeacherSignalConfig) -> float | None:
    if teacher.direction != "jsd":
        return None
    return JSD_BETA if teacher.jsd_beta is None else teacher.jsd_beta


def _place(rows: Rows, output_BSX: Tensor) -> Tensor:
    """[N] row of each response token in the flattened [M, X] output."""
    return rows.output_place_N(output_BSX.shape[1])


def _in_place(rows: Rows, values_NK: Tensor, output_BSX: Tensor, filling: float) -> Tensor:
    """[M, K]: the values beside their rows of the output, `filling` beside all others."""
    m = output_BSX.shape[0] * output_BSX.shape[1]
    out_MK = values_NK.new_full((m, values_NK.shape[1]), filling)
    out_MK[_place(rows, output_BSX)] = values_NK
    return out_MK


def _stacked(
    topks: Sequence[TopK | None], width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """[N, width] ids (int64) and logprobs (float32) of the samples, one after the other."""
    ids = [np.zeros((0, width), np.int64)]
    logprobs = [np.zeros((0, width), np.float32)]
    for topk in topks:
        assert topk is not None
        missing = width - topk.ids.shape[1]
        ids.append(np.pad(topk.ids.astype(np.int64), ((0, 0), (0, missing)), constant_values=-1))
        logprobs.append(np.pad(topk.logprobs, ((0, 0), (0, missing))))
    return (
        torch.from_numpy(np.concatenate(ids)).to(device),
        torch.from_numpy(np.concatenate(logprobs).astype(np.float32)).to(device),
    )


def _teacher_candidates(
    samples: Sequence[TrainSample], device: torch.device
) -> tuple[Tensor, Tensor]:
    """[N, 1 + K] ids and the teacher's logprobs: the sampled token, then the top-k.

    The kernel counts an id once, so that a sampled token among the top-k does no harm.
    """
    topks = []
    for sample in samples:
        topk, own = sample.teacher_topk, sample.teacher_logprobs
        assert topk is not None and own is not None, sample.sample_id
        topks.append(
            TopK(
                np.concatenate([np.asarray(sample.response_ids, np.int64)[:, None], topk.ids], 1),
                np.concatenate([np.asarray(own, np.float32)[:, None], topk.logprobs], 1),
            )
        )
    width = max((topk.ids.shape[1] for topk in topks), default=1)
    return _stacked(topks, width, device)
