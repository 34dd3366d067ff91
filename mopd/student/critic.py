"""The critic of PPO: a value head on the student's body (`objective.orm.estimator: ppo_gae`).

    V(s_t) = w . h_t + b            h_t: the body's last hidden state before token t, detached
    L_V = 1/N_tokens sum_t 1/2 (V(s_t) - R_t)^2

It starts at V = 0 and is detached from the body, so that fitting values cannot pull at the policy
(PPO's shared networks weigh the two losses against each other instead). Every rank of every
parallel layout holds the same few numbers: gradients come from the last pipeline stage, once per
data-parallel share, and are summed over all ranks.

Legend: B rows, S positions, H hidden size, N response tokens, R response positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mopd.config.objective import OrmConfig
from mopd.errors import ModelError
from mopd.objective.gae import gae
from mopd.objective_names import CRITIC_LR, GAE_GAMMA, GAE_LAMBDA
from mopd.student.batching import Rows
from mopd.types import TrainSample

FILE = "critic.safetensors"
"""Of a checkpoint, with what `Critic.state_dict` gave."""


class Critic:
    """See the module's text. Every method but `values` and `accumulate` is collective."""

    def __init__(
        self, hidden_size: int, config: OrmConfig, *, device: torch.device, speaks: bool
    ) -> None:
        """speaks: this rank is on the last stage, and alone counts for its data-parallel share."""
        self.head = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        lr = CRITIC_LR if config.critic_lr is None else config.critic_lr
        self._optimizer = torch.optim.Adam(self.head.parameters(), lr=lr)
        self._gamma = GAE_GAMMA if config.gae_gamma is None else config.gae_gamma
        self._lambda = GAE_LAMBDA if config.gae_lambda is None else config.gae_lambda
        self._whiten = config.whiten
        self._speaks, self._hidden_SBH = speaks, torch.empty(0)

    def watch(self, model: Any) -> None:
        """Remember what goes into the last layer of each forward pass. On the last stage only."""
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        layer = model.output_layer

        def remember(_: Any, inputs: tuple[Any, ...]) -> None:
            hidden_SBH = inputs[0].detach()
            if layer.sequence_parallel:
                hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH)
            self._hidden_SBH = hidden_SBH

        layer.register_forward_pre_hook(remember)

    def values(self, rows: Rows) -> Tensor:
        """[N] V of the states in which the last forward pass's response tokens were chosen."""
        hidden_NH = self._hidden_SBH[rows.position_N, rows.row_N].float()
        return self.head(hidden_NH).squeeze(1)

    def accumulate(self, rows: Rows, returns_BR: Tensor, mask_BR: Tensor, tokens: float) -> None:
        """Add the last forward pass's share of L_V to the gradients.

        returns_BR, mask_BR: R_t, and where there is one. tokens: of the whole update.
        """
        if not self._speaks or not bool(mask_BR.any()):
            return
        error_BR = torch.where(mask_BR, rows.spread(self.values(rows)) - returns_BR, 0.0)
        (0.5 * error_BR.square().sum() / max(tokens, 1.0)).backward()

    def step(self) -> None:
        """Sum the gradients over all ranks, update, forget them."""
        for parameter in self.head.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop what was accumulated."""
        self._optimizer.zero_grad(set_to_none=False)

    def advantages(
        self, samples: Sequence[TrainSample], values: Sequence[Sequence[float]]
    ) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float]]:
        """(sample id -> [R] GAE advantages, sample id -> [R] returns, metrics).

        The reward stands at the last token; what comes after it, cut off or not, is worth 0. A
        sample without a verdict has advantages of 0 and no returns. With `whiten`, z-scores over
        all tokens with a verdict.
        """
        judged = [
            (s, torch.tensor(v, dtype=torch.float64)[None])
            for s, v in zip(samples, values, strict=True)
            if s.reward is not None
        ]
        advantages = {s.sample_id: [0.0] * len(s.response_ids) for s in samples}
        returns: dict[str, list[float]] = {}
        for sample, values_1R in judged:
            rewards_1R = torch.zeros_like(values_1R)
            assert sample.reward is not None
            rewards_1R[0, -1] = sample.reward
            live_1R = torch.ones_like(values_1R, dtype=torch.bool)
            advantage_1R, return_1R = gae(
                rewards_1R, values_1R, live_1R, gamma=self._gamma, lam=self._lambda
            )
            advantages[sample.sample_id] = advantage_1R[0].tolist()
            returns[sample.sample_id] = return_1R[0].tolist()
        if not judged:
            return advantages, returns, {}
        if self._whiten:
            flat = torch.tensor([a for s, _ in judged for a in advantages[s.sample_id]])
            mean, deviation = float(flat.mean()), float(flat.std(correction=0)) + 1e-6
            for sample, _ in judged:
                own = advantages[sample.sample_id]
                advantages[sample.sample_id] = [(a - mean) / deviation for a in own]
        value = torch.cat([v[0] for _, v in judged])
        target = torch.tensor([r for s, _ in judged for r in returns[s.sample_id]]).double()
        spread = target.var(correction=0)
        explained = 1.0 - float((target - value).var(correction=0) / spread) if spread > 0 else 0.0
        error = float((target - value).square().mean()) / 2
        return advantages, returns, {"value_loss": error, "explained_variance": explained}

    def state_dict(self) -> dict[str, Tensor]:
        """The head, Adam's moments and its count, as float32 tensors."""
        state = {f"head.{name}": p.detach().clone() for name, p in self.head.named_parameters()}
        for name, parameter in self.head.named_parameters():
            kept = self._optimizer.state.get(parameter, {})
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{key}.{name}"] = kept.get(key, torch.zeros_like(parameter)).clone()
            state[f"step.{name}"] = torch.as_tensor(float(kept.get("step", 0.0)))
        return state

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint's folder; ModelError where it has no critic, or another's."""
        try:
            state = load_file(folder / FILE)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{folder}: its {FILE} cannot be read ({error}); the objective has a critic. "
                "Resume with the objective it was written with."
            ) from error
        self.load_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict`; ModelError for another shape."""
        wanted = self.state_dict()
        if {n: t.shape for n, t in wanted.items()} != {n: t.shape for n, t in state.items()}:
            raise ModelError(
                "the checkpoint's critic is of another student: its value head has other tensors "
                "or sizes. Start a run of another name."
            )
        for name, parameter in self.head.named_parameters():
            parameter.data.copy_(state[f"head.{name}"])
            self._optimizer.state[parameter] = {
                "step": state[f"step.{name}"].clone().float(),
                "exp_avg": state[f"exp_avg.{name}"].to(parameter),
                "exp_avg_sq": state[f"exp_avg_sq.{name}"].to(parameter),
            }
