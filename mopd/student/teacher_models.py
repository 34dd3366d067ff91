"""Teachers that run inside the student's ranks (`objective.teacher.signal: full`).

A whole distribution a position is too much to send, so the last pipeline stage loads each teacher
itself, as transformers has it, and hands its hidden states and head to the kernel, which takes the
teacher's logits tile by tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mopd.kernels.select import Head
from mopd.types import TrainSample


class TeacherModels:
    """Frozen causal language models by domain."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        *,
        dtype: torch.dtype,
        device: torch.device,
        vocab_start: int,
        rows: int,
    ) -> None:
        """
        folders: domain -> its teacher's Hugging Face folder; domains may share one.
        vocab_start, rows: this rank's shard of the vocabulary.
        """
        from transformers import AutoModelForCausalLM

        loaded = {
            folder: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            .to(device)
            .eval()
            .requires_grad_(False)
            for folder in sorted(set(folders.values()))
        }
        self._models = {domain: loaded[folder] for domain, folder in folders.items()}
        self._device, self._start, self._rows = device, vocab_start, rows

    @torch.no_grad()
    def heads(self, samples: Sequence[TrainSample]) -> list[tuple[Tensor, Head]]:
        """(places, head) by teacher: `Head` holds the hidden states that predict the response
        tokens at `places` of the samples' concatenated responses, [N], and this rank's shard of
        the teacher's LM head."""
        first = 0
        of_domain: dict[str, list[tuple[int, TrainSample]]] = {}
        for sample in samples:
            of_domain.setdefault(sample.domain, []).append((first, sample))
            first += len(sample.response_ids)
        found = []
        for domain, members in of_domain.items():
            model = self._models[domain]
            length = max(len(s.prompt_ids) + len(s.response_ids) - 1 for _, s in members)
            ids_BS = torch.zeros(len(members), length, dtype=torch.long, device=self._device)
            places: list[int] = []
            row: list[int] = []
            position: list[int] = []
            for index, (start, sample) in enumerate(members):
                inputs = [*sample.prompt_ids, *sample.response_ids][:-1]
                ids_BS[index, : len(inputs)] = torch.tensor(inputs, device=self._device)
                count, before = len(sample.response_ids), len(sample.prompt_ids) - 1
                places += range(start, start + count)
                row += [index] * count
                position += range(before, before + count)
            # Right padding: no real token looks at a padded one, so that no mask is needed.
            hidden_BSH = model.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state
            hidden_NH = hidden_BSH[torch.tensor(row), torch.tensor(position)]
            weight_VH = model.get_output_embeddings().weight
            shard_VH = weight_VH[self._start : self._start + self._rows]
            found.append((torch.tensor(places, device=self._device), Head(hidden_NH, shard_VH)))
        return found
