"""Which prompts a step trains on: each domain's share, exactly, and resumable.

The state is how many prompts each domain has given; everything else follows from it, the seed
and the prompts. So a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mopd.errors import ConfigError, DataError
from mopd.types import Prompt


@dataclass
class _Stream:
    """One domain's prompts in a fresh shuffled order each epoch."""

    name: str
    prompts: Sequence[Prompt]
    share: Fraction
    seed: int
    epoch: int = 0
    position: int = 0  # prompts of this epoch already given
    drawn: int = 0  # prompts given in all
    avoid: list[int] = field(default_factory=list)
    """Indices given by the draw that opened this epoch, before it did."""
    early: int = 0
    """How many more that same draw took from this epoch: those are none of `avoid`."""
    _order: list[int] = field(default_factory=list)

    def take(self, count: int) -> list[Prompt]:
        taken: list[int] = []
        order = self._epoch_order()
        while len(taken) < count:
            if self.position == len(order):
                # A step may reach into the next epoch, never to a prompt it already holds:
                # two groups of one prompt in one step would share their sample ids.
                self.epoch += 1
                self.position = 0
                self.avoid, self.early = sorted(taken), count - len(taken)
                self._order = []
                order = self._epoch_order()
            upto = min(len(order), self.position + count - len(taken))
            taken += order[self.position : upto]
            self.position = upto
        self.drawn += count
        return [self.prompts[index] for index in taken]

    def _epoch_order(self) -> list[int]:
        if not self._order:
            order = list(range(len(self.prompts)))
            random.Random(f"{self.seed}/{self.name}/{self.epoch}").shuffle(order)
            avoid = set(self.avoid)
            fresh = [index for index in order if index not in avoid][: self.early]
            chosen = set(fresh)
            self._order = fresh + [index for index in order if index not in chosen]
        return self._order

    def fingerprint(self) -> str:
        """Of every prompt's id and token ids, in order."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.id, prompt.token_ids]).encode() + b"\n")
        return digest.hexdigest()[:32]


class Mixture:
    """Draws prompts from several domains in proportion to their weights.

    In every draw of n a domain of share s has floor(n*s) or ceil(n*s) prompts, whoever has fallen
    furthest behind its share so far getting the larger number. Within an epoch of a domain no
    prompt comes twice; each epoch has its own order.
    """

    def __init__(
        self, domains: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float], seed: int
    ) -> None:
        """weights: one finite number >= 0 a domain, not all 0; a domain of weight 0 gives none."""
        if set(domains) != set(weights):
            odd = sorted(set(domains) ^ set(weights))
            raise ConfigError(f"prompts and weights are for different domains: {', '.join(odd)}")
        for name, weight in weights.items():
            if not math.isfinite(weight) or weight < 0:
                raise ConfigError(f"domains.{name}.weight must be finite and >= 0, got {weight}")
        total = sum((Fraction(str(weight)) for weight in weights.values()), Fraction(0))
        if total == 0:
            raise ConfigError("every domain has weight 0 (or there is none): nothing to draw")
        if seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {seed}")
        self._seed = seed
        self._streams = {
            name: _Stream(name, list(prompts), Fraction(str(weights[name])) / total, seed)
            for name, prompts in domains.items()
        }
        for name, stream in self._streams.items():
            if stream.share > 0 and not stream.prompts:
                raise DataError(f"domain {name!r} has no prompts to train on")
            ids = {prompt.id for prompt in stream.prompts}
            if len(ids) != len(stream.prompts):
                raise DataError(f"domain {name!r} has two prompts of one id")

    def require_room(self, n: int) -> None:
        """DataError if a draw of `n` could need more prompts of a domain than it has."""
        for name, stream in self._streams.items():
            most = math.ceil(n * stream.share)
            if most > len(stream.prompts):
                raise DataError(
                    f"domain {name!r} has {len(stream.prompts)} prompts, but its share of "
                    f"{n} a step is up to {most}: the same prompt would come twice in one step; "
                    "lower train.prompts_per_step or the domain's weight, or add prompts"
                )

    def draw(self, n: int) -> list[Prompt]:
        """The next `n` prompts, domains interleaved."""
        if n < 1:
            raise ConfigError(f"a step draws at least 1 prompt, got {n}")
        self.require_room(n)
        counts = self._allocate(n)
        placed: list[tuple[Fraction, int, Prompt]] = []
        for rank, (name, stream) in enumerate(self._streams.items()):
            for index, prompt in enumerate(stream.take(counts[name])):
                placed.append((Fraction(2 * index + 1, 2 * counts[name]), rank, prompt))
        return [prompt for _, _, prompt in sorted(placed, key=lambda each: each[:2])]

    def _allocate(self, n: int) -> dict[str, int]:
        """How many of each domain: integers that sum to n, each share rounded down or up."""
        total = n + sum(stream.drawn for stream in self._streams.values())
        counts = {name: math.floor(n * stream.share) for name, stream in self._streams.items()}
        behind = {
            name: total * stream.share - stream.drawn - counts[name]
            for name, stream in self._streams.items()
            if (n * stream.share).denominator != 1
        }
        # Ties go to the domain named first in the configuration: sorted() is stable.
        for name in sorted(behind, key=lambda name: -behind[name])[: n - sum(counts.values())]:
            counts[name] += 1
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Everything `load_state_dict` needs, as plain JSON."""
        return {
            "seed": self._seed,
            "domains": {
                name: {
                    "share": str(stream.share),
                    "prompts": stream.fingerprint(),
                    "drawn": stream.drawn,
                    "epoch": stream.epoch,
                    "position": stream.position,
                    "avoid": list(stream.avoid),
                    "early": stream.early,
                }
                for name, stream in self._streams.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; DataError names the domain whose prompts or share are others."""
        saved = state["domains"]
        if set(saved) != set(self._streams):
            odd = ", ".join(repr(name) for name in sorted(set(saved) ^ set(self._streams)))
            raise DataError(
                f"the checkpoint was made with other domains ({odd}); resume with the "
                "configuration it was made with, or start a run of another name"
            )
        if state["seed"] != self._seed:
            raise DataError(
                f"the checkpoint was made with seed {state['seed']}, this run has {self._seed}"
            )
        for name, stream in self._streams.items():
            if saved[name]["prompts"] != stream.fingerprint():
                raise DataError(
                    f"domain {name!r}: its prompts are not those of the checkpoint (rows or the "
                    "tokenizer have changed), so it cannot be known which were trained on; "
                    "restore them, or start a run of another name"
                )
            if saved[name]["share"] != str(stream.share):
                raise DataError(
                    f"domain {name!r}: the checkpoint was made with share "
                    f"{saved[name]['share']} of the prompts, this run has {stream.share}; "
                    "restore domains.*.weight, or start a run of another name"
                )
        for name, stream in self._streams.items():
            each = saved[name]
            stream.drawn, stream.epoch = int(each["drawn"]), int(each["epoch"])
            stream.position = int(each["position"])
            stream.avoid, stream.early = [int(i) for i in each["avoid"]], int(each["early"])
            stream._order = []
