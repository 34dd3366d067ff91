"""How often the student has solved each prompt of one domain, and which prompts are retired.

Source of retirement: "no positive resampling" of ScaleRL (arXiv 2510.13786, section 3.2), where a
prompt whose historical pass rate is .9 or more is not drawn again. The rate is over everything
ever judged of the prompt, as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PassHistory:
    """Counts by index of the prompt in its domain.

    `retire_above` None: nothing is ever retired. Else a prompt is retired by the record after
    which it has `retire_after` judged samples or more and passed a share of `retire_above` or more.
    """

    retire_above: float | None = None
    retire_after: int = 1
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Index -> (passed, judged); only prompts with a judged sample are in it."""
    retired: set[int] = field(default_factory=set)
    reopened: int = 0
    """How many times all retired prompts were given back because the others were too few."""

    def record(self, index: int, passed: int, judged: int) -> None:
        """Add the verdicts on one prompt's samples; 0 <= passed <= judged is the caller's part."""
        if not judged:
            return
        before = self.counts.get(index, (0, 0))
        passed, judged = before[0] + passed, before[1] + judged
        self.counts[index] = (passed, judged)
        if self.retire_above is not None and judged >= self.retire_after:
            if passed / judged >= self.retire_above:
                self.retired.add(index)

    def reopen(self) -> None:
        """Give every retired prompt back. Counts stay: one retires again when it is judged again
        and its rate is still high enough."""
        self.reopened += 1
        self.retired = set()

    def failure_rate(self, index: int) -> float:
        """1 - success rate; 1 for a prompt that was never judged, so that it is tried."""
        passed, judged = self.counts.get(index, (0, 0))
        return 1 - passed / judged if judged else 1.0

    def mean_pass_rate(self) -> float | None:
        """Mean over the judged prompts of each one's own rate; None before the first verdict."""
        if not self.counts:
            return None
        # fsum: a resumed run has the counts in another order, and must give the same number.
        rates = (passed / judged for passed, judged in self.counts.values())
        return math.fsum(rates) / len(self.counts)

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "counts": [[index, *self.counts[index]] for index in sorted(self.counts)],
            "retired": sorted(self.retired),
            "reopened": self.reopened,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.counts = {int(i): (int(passed), int(judged)) for i, passed, judged in state["counts"]}
        self.retired = {int(index) for index in state["retired"]}
        self.reopened = int(state["reopened"])
