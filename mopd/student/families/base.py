"""What a family of models must tell: its Megatron configuration and where each weight goes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.errors import ModelError
from mopd.student.packing import Packing, VocabularyRows, Whole

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Slot:
    """One Megatron parameter of one rank and the Hugging Face tensors it is packed from."""

    hf: tuple[str, ...]
    """Hugging Face names; also the slot's identity, equal on all ranks that hold a part of it."""
    packing: Packing
    expert: bool = False
    """Experts are cut over the expert-tensor-parallel group, the rest over tensor parallel."""


class Family(ABC):
    """A decoder of embedding, layers, final norm and head, built from a Hugging Face config.

    Refuses what it would not compute faithfully.
    """

    def __init__(self, hf: Any, where: str) -> None:
        """`hf`: the transformers config; `where`: what errors call the checkpoint.

        Raises ModelError for a setting of the checkpoint that is not implemented here.
        """
        self.hf = hf
        self.where = where
        self.check()

    def check(self) -> None:
        """Raise ModelError for a setting of the checkpoint that is not implemented here."""
        for name, expected in self.must_be().items():
            got = getattr(self.hf, name, expected)
            if got != expected:
                raise self.refusal(f"{name} is {got!r}; only {expected!r} is implemented")

    def refusal(self, text: str) -> ModelError:
        """The error for a setting that is not implemented."""
        return ModelError(
            f"{self.where}: {text} for {self.hf.model_type}. Choose another checkpoint for "
            "student.model."
        )

    @abstractmethod
    def must_be(self) -> dict[str, Any]:
        """Settings of the Hugging Face config with one implemented value."""

    @abstractmethod
    def transformer_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of Megatron's TransformerConfig that the checkpoint decides."""

    def gpt_kwargs(self) -> dict[str, Any]:
        """Further keyword arguments of Megatron's GPTModel (rotary positions)."""
        return {}

    @abstractmethod
    def layer_shapes(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        """Tensors of one layer, by the part of the Hugging Face name after ``layers.N.``."""

    @abstractmethod
    def layer_slot(self, prefix: str, name: str, first_expert: int) -> Slot:
        """Where `name` within a layer comes from; `prefix` is the layer's, ``model.layers.N.``.

        Each norm has a second name where Transformer Engine fuses it into a linear layer.
        """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the checkpoint must hold, by Hugging Face name."""
        hidden = self.hf.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, hidden)
        for layer in range(self.hf.num_hidden_layers):
            own = self.layer_shapes(layer)
            shapes.update({f"model.layers.{layer}.{name}": s for name, s in own.items()})
        return shapes

    def slot(self, name: str, layers: Sequence[int], first_expert: int) -> Slot:
        """Where Megatron's parameter `name` of this rank comes from.

        `layers` gives the global number of each of the rank's layers, `first_expert` the global
        number of its first expert.
        """
        rows = VocabularyRows(self.vocabulary)
        if name == "embedding.word_embeddings.weight":
            return Slot(("model.embed_tokens.weight",), rows)
        if name == "output_layer.weight":
            # With tied weights the last pipeline stage keeps a copy of the embedding here.
            return Slot(("model.embed_tokens.weight" if self.tied else "lm_head.weight",), rows)
        if name == "decoder.final_layernorm.weight":
            return Slot(("model.norm.weight",), Whole())
        match = _LAYER.fullmatch(name)
        assert match, f"Megatron parameter {name} is not known"
        return self.layer_slot(f"model.layers.{layers[int(match[1])]}.", match[2], first_expert)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.hf.tie_word_embeddings)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding in the checkpoint (may exceed the tokenizer's)."""
        return int(self.hf.vocab_size)

    @property
    def rope(self) -> dict[str, Any]:
        """The checkpoint's rotary settings, kind and base included."""
        return {"rope_type": "default", **(getattr(self.hf, "rope_parameters", None) or {})}

    @property
    def rope_theta(self) -> float:
        return float(self.rope["rope_theta"])

    @property
    def max_positions(self) -> int:
        return int(self.hf.max_position_embeddings)
