"""From one micro-batch's logits to its share of the objective, on the last pipeline stage.

Legend: B rows, S positions, R response positions, N response tokens, M = B * S, V columns of this
rank's vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.config.schema import ObjectiveConfig
from mopd.kernels.reference import IGNORE
from mopd.kernels.select import gathered_logprobs
from mopd.objective.mopd_loss import TokenInputs, mopd_loss
from mopd.objective.stats import domain_sums
from mopd.student import batching
from mopd.types import TrainSample


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
        length, vocabulary = logits_BSV.shape[1:]
        logits_MV = logits_BSV.reshape(-1, vocabulary)
        place_N = rows.row_N * length + rows.position_N
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
            inplace_backward=True,
            return_entropy=True,
        )
        return logprobs_M[place_N], entropy_M[place_N]

    def loss(
        self,
        rows: batching.Rows,
        samples: Sequence[TrainSample | None],
        logits_BSV: Tensor,
        num_sequences: int,
    ) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the objective, and its flattened domain sums."""
        logprobs_N, entropy_N = self.logprobs(
            rows, logits_BSV, self._temperature, self._valid_vocab
        )
        width = rows.response_shape[1]

        def padded(
            values: Callable[[TrainSample], Sequence[float] | None],
        ) -> tuple[Tensor, Tensor]:
            return batching.pad_responses(
                [None if s is None else values(s) for s in samples], width, self.device
            )

        sampler_BR, mask_BR = padded(lambda s: s.sampler_logprobs)
        teacher_BR, _ = padded(lambda s: s.teacher_logprobs)
        orm_B = torch.tensor(
            [0.0 if s is None else s.orm_advantage for s in samples], device=self.device
        )
        objective = self.objective
        loss, stats = mopd_loss(
            rows.spread(logprobs_N),
            TokenInputs(sampler_BR, teacher_BR, mask_BR, orm_B, rows.spread(entropy_N)),
            icepop_low=objective.icepop_low,
            icepop_high=objective.icepop_high,
            advantage_clip=objective.advantage_clip,
            denominator=objective.denominator,
            aggregation=objective.aggregation,
            num_sequences=num_sequences,
        )
        # Padding rows have no tokens; which domain they are put under does not matter.
        domain_B = torch.tensor(
            [0 if s is None else self.domains.index(s.domain) for s in samples],
            device=self.device,
        )
        return loss, domain_sums(stats, mask_BR, domain_B, len(self.domains)).flatten()
