"""One rank of the trained model: steps, logprobs, export, checkpoints.

Every method is collective: all ranks call it with the same arguments, and all get the same answer
or the same error. One `StudentRank` a process, because torch and Megatron keep process groups as
process globals.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.config.objective import ObjectiveConfig
from mopd.config.schema import StudentConfig
from mopd.errors import ModelError
from mopd.student import batching, checkpoint, cpu_platform, model, parallel, parts, routing
from mopd.student.critic import FILE
from mopd.student.expert_bias import check_rate
from mopd.student.opening import open_checkpoint
from mopd.student.publishing import Publisher
from mopd.student.save_hf import copy_settings, without_padding_tokens
from mopd.student.schedule import learning_rate
from mopd.student.updates import Updates
from mopd.types import TrainSample


class StudentRank:
    """A Megatron student; see the module's text for how to call it."""

    def __init__(
        self,
        config: StudentConfig,
        objective: ObjectiveConfig,
        domains: Sequence[str],
        total_steps: int,
        temperature: float,
        valid_vocab: int,
        pad_id: int,
        rank: int = 0,
        world_size: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int = 0,
        seed: int = 0,
        epochs: int = 1,
        minibatches: int = 1,
        teacher_folders: Mapping[str, Path] | None = None,
    ) -> None:
        """Join the other ranks and load `config.model`.

        temperature: of the rollouts; the objective's logprobs are of softmax(logits / T).
        valid_vocab: ids the tokenizer knows; rows of the head beyond it take no part in the
            softmax (nor do the rows added so that tp divides the vocabulary).
        total_steps: where the learning-rate schedule ends.
        epochs, minibatches: `step` makes epochs * minibatches optimizer updates.
        teacher_folders: domain -> its teacher's checkpoint, for the signal `full`.
        Raises ConfigError for an impossible layout, ModelError for a checkpoint that does not fit;
        both before any weight is loaded.
        """
        torch.set_num_threads(config.threads_per_rank)
        cpu_platform.install()
        self.config, self.rank, self.valid_vocab = config, rank, valid_vocab
        self.family, source = open_checkpoint(Path(config.model))
        if not 1 <= valid_vocab <= self.family.vocabulary:
            raise ModelError(
                f"{config.model}: the tokenizer has {valid_vocab} ids, the model's head "
                f"{self.family.vocabulary} rows; expected no more ids than rows."
            )
        learning_rate(0, config.optimizer, total_steps)  # an unknown schedule is refused now
        check_rate(config, self.family)
        parallel.check_layout(config.parallel, self.family, world_size)
        self._groups_before = parallel.start(
            config.parallel, rank, world_size, master_addr, master_port, seed
        )
        self._setting = parts.Setting(
            config,
            objective,
            self.family,
            list(domains),
            temperature,
            valid_vocab,
            pad_id,
            parallel.device(),
            dict(teacher_folders or {}),
        )
        self._parts = parts.build(self._setting, source)
        self.model, self.weights = self._parts.model, self._parts.weights
        self._optimizer, self._critic = self._parts.optimizer, self._parts.critic
        self._updates = Updates(
            self._setting,
            self._parts,
            total_steps=total_steps,
            epochs=epochs,
            minibatches=minibatches,
        )
        self._publisher: Publisher | None = None
        self._saving: checkpoint.BackgroundSave | None = None

    # -- training -----------------------------------------------------------------------------

    def refusals(self, samples: Sequence[TrainSample]) -> dict[str, str]:
        """Sample id -> why `step` would refuse it; for the caller to drop and count."""
        reasons = batching.refusals(
            samples,
            self.valid_vocab,
            self.family.max_positions,
            self._setting.domains,
            self.config.max_tokens_per_microbatch,
        )
        if self.config.routing_replay:
            config = self.model.config
            sizes = (config.num_layers, config.moe_router_topk, config.num_moe_experts)
            found = {s.sample_id: routing.refusal(s, *sizes) for s in samples}
            reasons = {k: v for k, v in found.items() if v} | reasons
        return reasons

    def step(self, samples: Sequence[TrainSample], step_index: int) -> dict[str, float]:
        """The optimizer updates of one step on `samples` (the whole step's, on every rank).

        `step_index` counts from 0. One update, or epochs * minibatches of them: the prompts are
        dealt to the minibatches, and pi_old is the student before the first update. An update
        without a token that counts (no samples, or all outside the truncation band) changes
        nothing: weights, moments and Adam's count stay as they are.
        Raises ModelError for samples in `refusals`, and for a loss or gradient that is not
        finite; that update is not made.
        """
        refused = self.refusals(samples)
        if refused:
            shown = "; ".join(f"{k}: {v}" for k, v in list(refused.items())[:5])
            raise ModelError(
                f"step {step_index}: {len(refused)} of {len(samples)} samples cannot be trained "
                f"on: {shown}. Drop them and count them (StudentRank.refusals)."
            )
        return self._updates.step(samples, step_index)

    # -- reading ------------------------------------------------------------------------------

    def logprobs(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        temperature: float = 1.0,
        whole_head: bool = True,
        samples: Sequence[TrainSample] | None = None,
    ) -> list[list[float]]:
        """[R] logprobs of each (prompt, response)'s response ids under the current weights.

        samples: those the sequences are of, where their expert choices are to be replayed.

        whole_head: normalise over every row of the checkpoint's head, as an inference engine
            does; else over the tokenizer's ids, as training does.
        """
        vocabulary = self.family.vocabulary if whole_head else self.valid_vocab
        return self._parts.logprobs(sequences, temperature, vocabulary, samples)

    def gradients(self) -> dict[str, Tensor] | None:
        """The last step's gradients before clipping, by Hugging Face name, on rank 0 (for
        checks; clipping scales them in place)."""
        return self.weights.collect(self._optimizer.gradients())

    def export(self, path: str | Path) -> dict[str, tuple[int, ...]]:
        """Write all weights as one Hugging Face safetensors file; returns name -> shape.

        The file appears whole or not at all. Rows added for tensor parallelism are not in it.
        Raises ModelError where it cannot be written.
        """
        # Not durable: it is read once and removed.
        return self.weights.write(self._parameters(), Path(path), durable=False)

    def publish(self, path: str | Path, transport: str) -> dict[str, int]:
        """Give the weights to whoever reads the safetensors file `path`; returns name -> sum of
        the words of each whole tensor as the ranks hold it.

        transport: `shared_memory`, the same file written in place each time by every rank;
            `file`, a new one that appears whole or not at all.
        Raises ModelError where it cannot be written.
        """
        publisher = self.publisher()
        if transport == "shared_memory":
            return publisher.share(Path(path))
        assert transport == "file", transport
        return publisher.write(Path(path))

    def publisher(self) -> Publisher:
        """Made at the first call, of all ranks at once."""
        if self._publisher is None:
            self._publisher = Publisher(self.weights, self._parameters())
        return self._publisher

    def save_hf(self, directory: str | Path) -> None:
        """Write a folder that AutoModelForCausalLM and AutoTokenizer load: the weights, and the
        source checkpoint's config and tokenizer files. Rows of the head past the tokenizer are
        made unlikely (`save_hf.without_padding_tokens`)."""
        directory = Path(directory)
        parallel.on_rank_zero(
            lambda: copy_settings(Path(self.config.model), directory, self.config.dtype),
            f"could not write the student to {directory}",
        )
        head = "model.embed_tokens.weight" if self.family.tied else "lm_head.weight"
        self.weights.write(
            self._parameters(),
            directory / checkpoint.WEIGHTS,
            change=without_padding_tokens(head, self.valid_vocab),
        )

    # -- checkpoints --------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """Write everything the student needs to go on from here (`mopd.student.checkpoint`)."""
        checkpoint.save(
            Path(directory),
            self.weights,
            self._optimizer,
            self._main_parameters(),
            self._identity(),
            self._further(),
            megatron=self.model if self.config.checkpoint_format == "megatron" else None,
        )

    def begin_save(self, directory: str | Path) -> None:
        """`save` in Megatron's format, but return once what is saved has been copied; it is written
        beside the steps that follow, and there after `finish_save`."""
        assert self._saving is None and self.config.checkpoint_format == "megatron"
        self._saving = checkpoint.BackgroundSave(
            Path(directory),
            self._optimizer,
            self._main_parameters(),
            self._identity(),
            self._further(),
            self.model,
            [*self._parameters().values(), *self._optimizer.state_tensors()],
        )

    def save_written(self) -> bool:
        """Whether this rank has nothing left to write. Not collective."""
        return self._saving is None or self._saving.written()

    def finish_save(self) -> float:
        """Wait for what `begin_save` began; returns the seconds that the slowest rank wrote.

        Raises ModelError where a rank could not write; the checkpoint before is whole.
        """
        saving, self._saving = self._saving, None
        assert saving is not None
        return saving.finish()

    def load(self, directory: str | Path) -> None:
        """Go on from what `save` wrote, at this or any other layout."""
        checkpoint.load(
            Path(directory),
            self.weights,
            self._optimizer,
            self._main_parameters(),
            self._identity(),
            self.family.shapes(),
            self.model,
        )
        if self._critic is not None:
            self._critic.load(Path(directory))

    # -- small helpers ------------------------------------------------------------------------

    def _parameters(self) -> dict[str, Tensor]:
        return model.state(self.model)

    def _main_parameters(self) -> dict[str, Tensor]:
        """All parameters, the trained ones in the precision the optimizer keeps them."""
        return self._parameters() | self._optimizer.main_parameters()

    def _further(self) -> dict[str, dict[str, Tensor]]:
        """Further files of a checkpoint."""
        if self._critic is None:
            return {}
        return {FILE: {name: t.cpu() for name, t in self._critic.state_dict().items()}}

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be gone on from."""
        return {
            "model_type": self.family.hf.model_type,
            "frozen_routers": self.config.freeze_routers,
            "critic": self._critic is not None,
        }

    def close(self) -> None:
        """Leave the process groups; the object cannot be used afterwards."""
        parallel.stop(self._groups_before)
        # Gradient hooks in C++, which the garbage collector cannot see, keep Megatron's wrapper and
        # through it the groups with their sockets and threads.
        self._parts.ddp.__dict__.clear()
        self.__dict__.clear()
        gc.collect()
