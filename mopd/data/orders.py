"""In which order one domain's prompts come: shuffled, prioritised, or easy to hard.

An order only picks indices. Which of them are barred is told to each pick: `held`, those that the
step already holds (two groups of one prompt in a step would share their sample ids), and
`retired`. Picks are a pure function of the seed, the domain's name and the order's own state; the
caller asks for no more than there are, so `count` indices always come back. A pick replaces what
the order keeps and changes nothing in place, so that a shallow copy stays where it was made.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from fractions import Fraction
from typing import Any, Protocol

from mopd.data.history import PassHistory


class Order(Protocol):
    """One domain's order."""

    def pick(
        self, count: int, held: AbstractSet[int], retired: AbstractSet[int], step: int
    ) -> list[int]:
        """`count` different indices, none held or retired. `step`: whole draws before this one."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Shuffled:
    """Every prompt once an epoch, each epoch in a fresh shuffled order.

    A prompt whose turn comes while the step already holds it (the step reaches into the next
    epoch) is owed: it comes first in the next pick. One whose turn comes while it is retired is
    passed over for that epoch.
    """

    def __init__(self, name: str, size: int, seed: int) -> None:
        self._key, self._size = f"{seed}/{name}", size
        self._epoch, self._position = 0, 0
        self._owed: list[int] = []
        self._order: list[int] = []

    def pick(
        self, count: int, held: AbstractSet[int], retired: AbstractSet[int], step: int
    ) -> list[int]:
        taken: list[int] = []
        held = set(held)

        def offer(index: int) -> bool:
            """Take it; False if its turn must wait."""
            if index in retired:
                return True
            if index in held:
                return False
            taken.append(index)
            held.add(index)
            return True

        owed, self._owed = self._owed, []
        for place, index in enumerate(owed):
            if len(taken) == count:
                self._owed += owed[place:]
                break
            if not offer(index):
                self._owed.append(index)
        while len(taken) < count:
            if not self._order:
                self._order = list(range(self._size))
                random.Random(f"{self._key}/{self._epoch}").shuffle(self._order)
            if self._position == self._size:
                self._epoch, self._position, self._order = self._epoch + 1, 0, []
                continue
            index = self._order[self._position]
            self._position += 1
            if not offer(index):
                self._owed.append(index)
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "owed": list(self._owed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._owed = [int(index) for index in state["owed"]]
        self._order = []


class Prioritised:
    """Drawn in proportion to 1 - success rate (Kimi K1.5, arXiv 2501.12599, section 2.3.3).

    Without replacement within a step, with replacement across steps. A prompt never judged has
    weight 1; one that always succeeds has `min_priority`, so that forgetting is noticed.
    """

    def __init__(
        self, name: str, size: int, seed: int, history: PassHistory, min_priority: float
    ) -> None:
        self._key, self._size = f"{seed}/{name}/prioritised", size
        self._history, self._min = history, min_priority
        self._picks = 0

    def pick(
        self, count: int, held: AbstractSet[int], retired: AbstractSet[int], step: int
    ) -> list[int]:
        rng = random.Random(f"{self._key}/{self._picks}")
        self._picks += 1
        # Exponential clocks of rate w: the order in which they ring is that of weighted draws
        # without replacement. One number a prompt, barred or not, so that a prompt's clock does
        # not depend on who else may be drawn.
        rings = []
        for index in range(self._size):
            clock = -math.log(1.0 - rng.random())
            if index not in held and index not in retired:
                weight = max(self._min, self._history.failure_rate(index))
                rings.append((clock / weight, index))
        return [index for _, index in sorted(rings)[:count]]

    def state_dict(self) -> dict[str, Any]:
        return {"picks": self._picks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._picks = int(state["picks"])


class Curriculum:
    """Easy to hard (Kimi K1.5, section 2.3.3): uniform draws from the easiest share of the prompts.

    The share grows linearly from `start` at the first step to 1 at step `steps` and stays there.
    Draws go in rounds: none comes twice in a round, a newly opened prompt joins the round that is
    running, and a round ends when every open prompt has come. When retirement has left too few
    open, the easiest of the closed ones are opened early.
    """

    def __init__(
        self, name: str, difficulties: Sequence[float], seed: int, start: float, steps: int
    ) -> None:
        """difficulties: one finite number a prompt; ties are in an order drawn by the seed."""
        self._key, self._size = f"{seed}/{name}/curriculum", len(difficulties)
        self._start, self._steps = Fraction(str(start)), steps
        ties = list(range(self._size))
        random.Random(f"{self._key}/ties").shuffle(ties)
        self._by_difficulty = sorted(ties, key=lambda index: difficulties[index])
        self._picks = 0
        self._seen: set[int] = set()

    def open_count(self, step: int) -> int:
        """How many prompts may be drawn at a step (the first is 0): the share, rounded up."""
        done = Fraction(min(step, self._steps - 1), self._steps - 1) if self._steps > 1 else 1
        return math.ceil((self._start + (1 - self._start) * done) * self._size)

    def pick(
        self, count: int, held: AbstractSet[int], retired: AbstractSet[int], step: int
    ) -> list[int]:
        rng = random.Random(f"{self._key}/{self._picks}")
        self._picks += 1
        allowed = [i for i in self._by_difficulty if i not in held and i not in retired]
        opened = set(self._by_difficulty[: self.open_count(step)])
        available = [index for index in allowed if index in opened]
        available += [index for index in allowed if index not in opened][
            : max(0, count - len(available))
        ]
        fresh = [index for index in available if index not in self._seen]
        taken = rng.sample(fresh, min(count, len(fresh)))
        self._seen = self._seen | set(taken)
        if len(taken) < count:  # every open prompt has come: a new round
            again = rng.sample(sorted(set(available) - set(taken)), count - len(taken))
            taken += again
            self._seen = set(again)
        return taken

    def state_dict(self) -> dict[str, Any]:
        seen = bytearray((self._size + 7) // 8)  # one bit a prompt: there may be many
        for index in self._seen:
            seen[index >> 3] |= 1 << (index & 7)
        return {"picks": self._picks, "seen": seen.hex()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._picks = int(state["picks"])
        seen = bytes.fromhex(state["seen"])
        self._seen = {i for i in range(self._size) if seen[i >> 3] >> (i & 7) & 1}
