"""From one micro-batch's output to its share of the objective, on the last pipeline stage.

Legend: B rows, S positions, R response positions, N response tokens; X: logits, or hidden states
where the LM head is left to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.config.objective import ObjectiveConfig
from mopd.objective.inputs import StepTotals, TokenInputs
from mopd.objective.loss import objective_loss
from mopd.objective.stats import domain_sums
from mopd.objective_names import POLICY_LOSS_SPECS
from mopd.student import batching
from mopd.student.teacher_models import TeacherModels
from mopd.student.token_scores import TokenScorer
from mopd.types import TrainSample, group_of


@dataclass(frozen=True)
class Update:
    """What one optimizer update knows of all its samples, on every rank."""

    totals: StepTotals
    group_tokens: Mapping[str, int]
    """Response tokens of each prompt's samples."""
    old_logprobs: Mapping[str, Sequence[float]] | None = None
    """sample id -> log pi_old; None at a batch's only update."""
    advantages: Mapping[str, Sequence[float]] | None = None
    """sample id -> a critic's advantages by token; None without a critic."""

    @classmethod
    def of(
        cls,
        samples: Sequence[TrainSample],
        old_logprobs: Mapping[str, Sequence[float]] | None = None,
        advantages: Mapping[str, Sequence[float]] | None = None,
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
        return cls(totals, group_tokens, old_logprobs, advantages)


class LossHead:
    """Output -> numbers of the response tokens -> loss. Knows nothing of Megatron's schedule."""

    def __init__(
        self,
        objective: ObjectiveConfig,
        domains: Sequence[str],
        scorer: TokenScorer,
        *,
        temperature: float,
        valid_vocab: int,
        device: torch.device,
        teachers: TeacherModels | None = None,
    ) -> None:
        """
        temperature: of the rollouts; the objective's logprobs are of softmax(logits / T).
        valid_vocab: ids that take part in the objective's softmax.
        teachers: for the signal `full`.
        """
        self.objective, self.domains, self.device = objective, list(domains), device
        self.scorer, self._teachers = scorer, teachers
        self._temperature, self._valid_vocab = temperature, valid_vocab

    def loss(
        self,
        rows: batching.Rows,
        samples: Sequence[TrainSample | None],
        output_BSX: Tensor,
        update: Update,
    ) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the objective, and its flattened domain sums."""
        logprobs_N, entropy_N = self.scorer.logprobs(
            rows, output_BSX, self._temperature, self._valid_vocab
        )
        width = rows.response_shape[1]
        live = [s for s in samples if s is not None]
        old = update.old_logprobs

        def padded(values: Callable[[TrainSample], Sequence[float] | None]) -> Tensor | None:
            if not all(values(s) is not None for s in live):
                return None  # not asked for; where the objective reads it, it says so
            given = [None if s is None else values(s) for s in samples]
            return batching.pad_responses(given, width, self.device)[0]

        def each(value: Callable[[TrainSample], float], padding: float) -> Tensor:
            return torch.tensor(
                [padding if s is None else value(s) for s in samples], device=self.device
            )

        sampler_BR, mask_BR = batching.pad_responses(
            [None if s is None else s.sampler_logprobs for s in samples], width, self.device
        )
        orm = each(lambda s: s.orm_advantage, 0.0)
        if update.advantages is not None:
            of_token = update.advantages
            orm = batching.pad_responses(
                [
                    None if s is None else [s.reward_weight * a for a in of_token[s.sample_id]]
                    for s in samples
                ],
                width,
                self.device,
            )[0]
        student_topk_BRK, sampler_topk_BRK = self._sampler_topk(rows, live, output_BSX)
        loss, stats = objective_loss(
            rows.spread(logprobs_N),
            TokenInputs(
                mask_BT=mask_BR,
                sampler_logprobs_BT=sampler_BR,
                orm_advantage_B=orm,
                old_logprobs_BT=padded(lambda s: None if old is None else old[s.sample_id]),
                teacher_logprobs_BT=padded(lambda s: s.teacher_logprobs),
                reference_logprobs_BT=padded(lambda s: s.reference_logprobs),
                divergence_BT=self._divergence(rows, live, output_BSX),
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
        self, rows: batching.Rows, live: Sequence[TrainSample], output_BSX: Tensor
    ) -> Tensor | None:
        """[B, R] D(student, teacher) at each response token, differentiable; None where the
        teacher's part is an advantage, or there is none."""
        teacher = self.objective.teacher
        if teacher.weight == 0 or teacher.signal == "sampled":
            return None
        options = (teacher, self._temperature, self._valid_vocab)
        if teacher.signal == "topk":
            divergence_N = self.scorer.topk_divergence(rows, live, output_BSX, *options)
        else:
            assert self._teachers is not None
            divergence_N = self.scorer.full_divergence(
                rows, live, output_BSX, self._teachers, *options
            )
        return rows.spread(divergence_N)

    def _sampler_topk(
        self, rows: batching.Rows, live: Sequence[TrainSample], output_BSX: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        if not POLICY_LOSS_SPECS[self.objective.loss.name].needs_topk:
            return None, None
        return self.scorer.sampler_topk(
            rows, live, output_BSX, self._temperature, self._valid_vocab
        )
