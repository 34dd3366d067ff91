"""From one micro-batch's logits to its share of the objective, on the last pipeline stage.

Legend: B rows, S positions, R response positions, N response tokens, M = B * S, V columns of this
rank's vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mopd.config.objective import ObjectiveConfig
from mopd.kernels.buckets import UNUSED
from mopd.kernels.reference import IGNORE
from mopd.kernels.select import gathered_logprobs, topk_divergence, topk_logprobs
from mopd.objective.inputs import StepTotals, TokenInputs
from mopd.objective.loss import objective_loss
from mopd.objective.stats import domain_sums
from mopd.objective_names import JSD_BETA, POLICY_LOSS_SPECS
from mopd.student import batching
from mopd.types import TopK, TrainSample, group_of


@dataclass(frozen=True)
class Update:
    """What one optimizer update knows of all its samples, on every rank."""

    totals: StepTotals
    group_tokens: Mapping[str, int]
    """Response tokens of each prompt's samples."""
    old_logprobs: Mapping[str, Sequence[float]] | None = None
    """sample id -> log pi_old; None at a batch's only update."""

    @classmethod
    def of(
        cls,
        samples: Sequence[TrainSample],
        old_logprobs: Mapping[str, Sequence[float]] | None = None,
    ) -> Update:
        """Counted over `samples`, all of the update's."""
        group_tokens: dict[str, int] = {}
        for sample in samples:
            group = group_of(sample.sample_id)
            group_tokens[group] = group_tokens.get(group, 0) + len(sample.response_ids)
        totals = StepTotals(
            tokens=float(sum(group_tokens.values())),
            sequences=float(len(samples)),
            prompts=float(len(group_tokens)),
        )
        return cls(totals, group_tokens, old_logprobs)


class LossHead:
    """Logits -> logprobs of the response tokens -> loss. Knows nothing of Megatron's schedule."""

    def __init__(
        self,
        objective: ObjectiveConfig,
        domains: Sequence[str],
        *,
        kernel: str,
        temperature: float,
        valid_vocab: int,
        vocab_start: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """
        temperature: of the rollouts; the objective's logprobs are of softmax(logits / T).
        valid_vocab: ids that take part in the objective's softmax.
        vocab_start, group: this rank's first token id, and the ranks with the other shards.
        """
        self.objective, self.domains, self.device = objective, list(domains), device
        self._kernel, self._temperature, self._valid_vocab = kernel, temperature, valid_vocab
        self._vocab_start, self._group = vocab_start, group

    def logprobs(
        self, rows: batching.Rows, logits_BSV: Tensor, temperature: float, valid_vocab: int
    ) -> tuple[Tensor, Tensor]:
        """([N] logprobs of the response tokens, [N] entropies), nats, float32."""
        # Every position in place, the prompts' ignored: selecting the response rows first would
        # copy them, and its backward would make a second tensor as large as the logits.
        logits_MV = logits_BSV.reshape(-1, logits_BSV.shape[-1])
        place_N = self._place(rows, logits_BSV)
        target_M = torch.full((logits_MV.shape[0],), IGNORE, device=logits_MV.device)
        target_M[place_N] = rows.target_N
        logprobs_M, entropy_M = gathered_logprobs(
            logits_MV,
            target_M,
            temperature=temperature,
            valid_vocab=valid_vocab,
            vocab_start=self._vocab_start,
            group=self._group,
            backend=self._kernel,
            # The divergences read the logits in their own backward.
            inplace_backward=self.objective.teacher.signal == "sampled",
            return_entropy=True,
        )
        return logprobs_M[place_N], entropy_M[place_N]

    def loss(
        self,
        rows: batching.Rows,
        samples: Sequence[TrainSample | None],
        logits_BSV: Tensor,
        update: Update,
    ) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the objective, and its flattened domain sums."""
        logprobs_N, entropy_N = self.logprobs(
            rows, logits_BSV, self._temperature, self._valid_vocab
        )
        width = rows.response_shape[1]
        live = [s for s in samples if s is not None]

        def padded(
            values: Callable[[TrainSample], Sequence[float] | None], wanted: bool = True
        ) -> Tensor | None:
            if not wanted:
                return None
            return batching.pad_responses(
                [None if s is None else values(s) for s in samples], width, self.device
            )[0]

        def each(value: Callable[[TrainSample], float], padding: float) -> Tensor:
            return torch.tensor(
                [padding if s is None else value(s) for s in samples], device=self.device
            )

        sampler_BR, mask_BR = batching.pad_responses(
            [None if s is None else s.sampler_logprobs for s in samples], width, self.device
        )
        old = update.old_logprobs
        student_topk_BRK, sampler_topk_BRK = self._sampler_topk(rows, live, logits_BSV)
        loss, stats = objective_loss(
            rows.spread(logprobs_N),
            TokenInputs(
                mask_BT=mask_BR,
                sampler_logprobs_BT=sampler_BR,
                orm_advantage_B=each(lambda s: s.orm_advantage, 0.0),
                old_logprobs_BT=padded(lambda s: (old or {})[s.sample_id], old is not None),
                teacher_logprobs_BT=padded(
                    lambda s: s.teacher_logprobs,
                    any(s.teacher_logprobs is not None for s in live),
                ),
                reference_logprobs_BT=padded(
                    lambda s: s.reference_logprobs,
                    self.objective.kl.reference is not None,
                ),
                divergence_BT=self._divergence(rows, live, logits_BSV),
                student_topk_BTK=student_topk_BRK,
                sampler_topk_BTK=sampler_topk_BRK,
                domain_weight_B=each(lambda s: s.weight, 1.0),
                group_tokens_B=each(lambda s: update.group_tokens[group_of(s.sample_id)], 1.0),
                entropy_BT=rows.spread(entropy_N),
            ),
            self.objective,
            update.totals,
        )
        # Padding rows have no tokens; which domain they are put under does not matter.
        domain_B = torch.tensor(
            [0 if s is None else self.domains.index(s.domain) for s in samples],
            device=self.device,
        )
        return loss, domain_sums(stats, mask_BR, domain_B, len(self.domains)).flatten()

    def _divergence(
        self, rows: batching.Rows, live: Sequence[TrainSample], logits_BSV: Tensor
    ) -> Tensor | None:
        """[B, R] D(student, teacher) at each response token, differentiable; None if the teacher's
        part is an advantage, or there is none."""
        teacher = self.objective.teacher
        if teacher.weight == 0 or teacher.signal == "sampled":
            return None
        beta = None
        if teacher.direction == "jsd":
            beta = JSD_BETA if teacher.jsd_beta is None else teacher.jsd_beta
        assert teacher.signal == "topk"
        logits_MV = logits_BSV.reshape(-1, logits_BSV.shape[-1])
        ids_NK, logprobs_NK = self._candidates(live, [s.teacher_topk for s in live])
        divergence_M = topk_divergence(
            logits_MV,
            self._in_place(rows, ids_NK, logits_BSV, UNUSED),
            self._in_place(rows, logprobs_NK, logits_BSV, 0.0),
            direction=teacher.direction,
            beta=beta,
            temperature=self._temperature,
            valid_vocab=self._valid_vocab,
            vocab_start=self._vocab_start,
            group=self._group,
            backend=self._kernel,
        )
        return rows.spread(divergence_M[self._place(rows, logits_BSV)])

    def _candidates(
        self, live: Sequence[TrainSample], topks: Sequence[TopK | None]
    ) -> tuple[Tensor, Tensor]:
        """([N, 1 + K] ids, [N, 1 + K] the teacher's logprobs): the sampled token, then its top-k.

        The kernel counts an id once, so that a sampled token among the top-k does no harm.
        """
        ids, logprobs = [], []
        for sample, topk in zip(live, topks, strict=True):
            assert topk is not None and sample.teacher_logprobs is not None, sample.sample_id
            sampled = np.asarray(sample.response_ids, np.int64)[:, None]
            own = np.asarray(sample.teacher_logprobs, np.float32)[:, None]
            ids.append(np.concatenate([sampled, topk.ids.astype(np.int64)], 1))
            logprobs.append(np.concatenate([own, topk.logprobs], 1))
        if not ids:
            empty = torch.zeros(0, 1, device=self.device)
            return empty.long(), empty
        return (
            torch.from_numpy(np.concatenate(ids)).to(self.device),
            torch.from_numpy(np.concatenate(logprobs)).to(self.device),
        )

    def _sampler_topk(
        self, rows: batching.Rows, live: Sequence[TrainSample], logits_BSV: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """[B, R, K] logprobs of student and sampler on the sampler's top-k; -inf fills."""
        if not POLICY_LOSS_SPECS[self.objective.loss.name].needs_topk:
            return None, None
        topks = [s.sampler_topk for s in live]
        assert all(topk is not None for topk in topks)
        width = max((t.ids.shape[1] for t in topks if t is not None), default=1)
        nothing = np.zeros((0, width))
        ids = np.concatenate([nothing, *(t.ids for t in topks if t is not None)])
        logprobs = np.concatenate([nothing, *(t.logprobs for t in topks if t is not None)])
        ids_NK = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        sampler_NK = torch.from_numpy(logprobs.astype(np.float32)).to(self.device)
        student_MK = topk_logprobs(
            logits_BSV.reshape(-1, logits_BSV.shape[-1]),
            self._in_place(rows, ids_NK, logits_BSV, UNUSED),
            temperature=self._temperature,
            valid_vocab=self._valid_vocab,
            vocab_start=self._vocab_start,
            group=self._group,
            backend=self._kernel,
        )
        student_NK = student_MK[self._place(rows, logits_BSV)].float()

        def spread(values_NK: Tensor) -> Tensor:
            b, r = rows.response_shape
            filled_NK = values_NK.masked_fill(ids_NK == UNUSED, -torch.inf)
            out = filled_NK.new_full((b * r, width), -torch.inf)
            out[rows.place_N] = filled_NK
            return out.view(b, r, width)

        return spread(student_NK), spread(sampler_NK)

    @staticmethod
    def _place(rows: batching.Rows, logits_BSV: Tensor) -> Tensor:
        """[N] row of each response token in the flattened [M, V] logits."""
        return rows.row_N * logits_BSV.shape[1] + rows.position_N

    def _in_place(
        self, rows: batching.Rows, values_NK: Tensor, logits_BSV: Tensor, filling: float
    ) -> Tensor:
        """[M, K]: the values beside their rows of the logits, `filling` beside all other rows."""
        m = logits_BSV.shape[0] * logits_BSV.shape[1]
        out_MK = values_NK.new_full((m, values_NK.shape[1]), filling)
        out_MK[self._place(rows, logits_BSV)] = values_NK
        return out_MK
