"""One domain's prompts: which the step at hand has been given, which are left, and the way back."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from mopd.data.history import PassHistory
from mopd.data.orders import Order
from mopd.errors import DataError
from mopd.types import Prompt


@dataclass
class Stream:
    """What `Mixture` keeps of one domain."""

    name: str
    prompts: Sequence[Prompt]
    share: Fraction
    """Of all prompts that are drawn, within [0, 1]."""
    order: Order
    history: PassHistory
    drawn: int = 0
    """Prompts given in all, replacements not counted: they are not of the share."""
    held: set[int] = field(default_factory=set)
    """What the current step has been given."""
    _before: tuple[Order, int, set[int], set[int], int] | None = field(default=None, init=False)

    def left(self) -> int:
        """How many prompts can still be given to this step."""
        return len(self.prompts) - len(self.held | self.history.retired)

    def begin_step(self) -> None:
        """The step holds nothing yet; `take_back` comes back to before it."""
        # Orders replace what they keep, and a reopened history its set: nothing need be copied.
        history = self.history
        self._before = (
            copy.copy(self.order), self.drawn, self.held, history.retired, history.reopened
        )  # fmt: skip
        self.held = set()

    def take(self, count: int, step: int) -> list[Prompt]:
        """The next `count` prompts, of which there must be as many left, for this step."""
        assert count <= self.left()
        taken = self.order.pick(count, self.held, self.history.retired, step)
        self.held.update(taken)
        return [self.prompts[index] for index in taken]

    def record(self, index: int, passed: int, judged: int) -> None:
        """Verdicts on one prompt's samples, from which there is no way back."""
        self._before = None
        self.history.record(index, passed, judged)

    def take_back(self) -> None:
        """As it was at the last `begin_step`, since which nothing may have been recorded."""
        assert self._before is not None
        self.order, self.drawn, self.held, retired, reopened = self._before
        self.history.retired, self.history.reopened = retired, reopened
        self._before = None

    @cached_property
    def fingerprint(self) -> str:
        """Of every prompt's id, token ids and difficulty, in order; they never change."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            row = [prompt.id, prompt.token_ids, prompt.difficulty]
            digest.update(json.dumps(row).encode() + b"\n")
        return digest.hexdigest()[:32]

    def state_dict(self) -> dict[str, Any]:
        """Everything `load_state_dict` needs, as plain JSON."""
        return {
            "share": str(self.share),
            "prompts": self.fingerprint,
            "drawn": self.drawn,
            "held": sorted(self.held),
            "order": self.order.state_dict(),
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state for which `require_same` has nothing to say."""
        self._before = None
        self.drawn = int(state["drawn"])
        self.held = {int(index) for index in state["held"]}
        self.order.load_state_dict(state["order"])
        self.history.load_state_dict(state["history"])

    def require_same(self, state: Mapping[str, Any]) -> None:
        """Raises DataError if the state is of other prompts or of another share."""
        if state["prompts"] != self.fingerprint:
            raise DataError(
                f"domain {self.name!r}: its prompts are not those of the checkpoint (rows, their "
                "difficulty or the tokenizer have changed), so it cannot be known which were "
                "trained on; restore them, or start a run of another name"
            )
        if state["share"] != str(self.share):
            raise DataError(
                f"domain {self.name!r}: the checkpoint was made with share "
                f"{state['share']} of the prompts, this run has {self.share}; "
                "restore domains.*.weight, or start a run of another name"
            )
