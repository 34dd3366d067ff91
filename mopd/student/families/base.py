"""What a family of models must tell: its Megatron configuration and where each weight goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mopd.student.packing import Packing


@dataclass(frozen=True, slots=True)
class Slot:
    """One Megatron parameter of one rank and the Hugging Face tensors it is packed from."""

    hf: tuple[str, ...]
    """Hugging Face names; also the slot's identity, equal on all ranks that hold a part of it."""
    packing: Packing
    expert: bool = False
    """Experts are cut over the expert-tensor-parallel group, the rest over tensor parallel."""


class Family(ABC):
    """Built from a Hugging Face config; refuses what it would not compute faithfully."""

    def __init__(self, hf: Any, where: str) -> None:
        self.hf = hf
        self.where = where
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Raise ModelError for a setting of the checkpoint that is not implemented here."""

    @abstractmethod
    def transformer_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of Megatron's TransformerConfig that the checkpoint decides."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the checkpoint must hold, by Hugging Face name."""

    @abstractmethod
    def slot(self, name: str, layers: Sequence[int], first_expert: int) -> Slot:
        """Where Megatron's parameter `name` of this rank comes from.

        `layers` gives the global number of each of the rank's layers, `first_expert` the global
        number of its first expert.
        """

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.hf.tie_word_embeddings)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding in the checkpoint (may exceed the tokenizer's)."""
        return int(self.hf.vocab_size)

    @property
    def rope_theta(self) -> float:
        return float(self.hf.rope_parameters["rope_theta"])

    @property
    def max_positions(self) -> int:
        return int(self.hf.max_position_embeddings)
