"""Which prompts a step trains on: each domain's share, exactly, and resumable.

    weights -> how many of each domain (here) -> which ones (`mopd.data.stream`, in one of
    `mopd.data.orders`)
    verdicts -> pass rates, retired prompts (`mopd.data.history`) -> which ones

Draws are a pure function of the seed, the prompts and the state, which is small and saved with
every checkpoint. So a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mopd.config.schema import SamplingConfig
from mopd.data.history import PassHistory
from mopd.data.orders import Curriculum, Shuffled
from mopd.data.sampling import make_order, require_same_rules, resolve_rules
from mopd.data.stream import Stream
from mopd.errors import ConfigError, DataError
from mopd.types import Prompt


class Mixture:
    """Draws prompts from several domains in proportion to their weights.

    In every draw of n a domain of share s has floor(n*s) or ceil(n*s) prompts, whoever has fallen
    furthest behind its share so far getting the larger number. No step holds a prompt twice.

    When a domain has too few prompts left that are not retired for a draw, all its retired ones
    are given back (`reopened` in the metrics, told once through `take_warnings`): a run never
    stops for having learnt everything.
    """

    def __init__(
        self,
        domains: Mapping[str, Sequence[Prompt]],
        weights: Mapping[str, float],
        seed: int,
        sampling: SamplingConfig | None = None,
        total_steps: int | None = None,
    ) -> None:
        """weights: one finite number >= 0 a domain, not all 0; a domain of weight 0 gives none.

        sampling: None is `SamplingConfig()`, a plain shuffle.
        total_steps: train.steps; only the curriculum of sampling.curriculum_steps null reads it.
        Raises ConfigError for weights, seed and sampling, DataError for the prompts.
        """
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
        self._rules = resolve_rules(sampling or SamplingConfig(), total_steps)
        self._steps = 0  # draws begun
        self._warnings: list[str] = []
        self._places: dict[str, tuple[Stream, int]] = {}
        self._streams: dict[str, Stream] = {}
        for name, prompts in domains.items():
            share = Fraction(str(weights[name])) / total
            if share > 0 and not prompts:
                raise DataError(f"domain {name!r} has no prompts to train on")
            history = PassHistory(self._rules["retire_above"], self._rules["retire_after"] or 1)
            # A domain of weight 0 is never drawn from, so it needs no difficulties either.
            order = (
                make_order(name, prompts, seed, history, self._rules)
                if share > 0
                else Shuffled(name, 0, seed)
            )
            stream = Stream(name, list(prompts), share, order, history)
            self._streams[name] = stream
            for index, prompt in enumerate(prompts):
                other, _ = self._places.setdefault(prompt.id, (stream, index))
                if self._places[prompt.id] != (stream, index):
                    where = "" if other is stream else f" (the other is of domain {other.name!r})"
                    raise DataError(f"domain {name!r} has two prompts of one id{where}")

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
        """The next step's `n` prompts, domains interleaved."""
        if n < 1:
            raise ConfigError(f"a step draws at least 1 prompt, got {n}")
        self.require_room(n)
        counts = self._allocate(n)
        placed: list[tuple[Fraction, int, Prompt]] = []
        for rank, (name, stream) in enumerate(self._streams.items()):
            count = counts[name]
            stream.begin_step()
            if stream.left() < count:
                self._reopen(stream, count)
            for index, prompt in enumerate(stream.take(count, self._steps)):
                placed.append((Fraction(2 * index + 1, 2 * count), rank, prompt))
            stream.drawn += count
        self._steps += 1
        return [prompt for _, _, prompt in sorted(placed, key=lambda each: each[:2])]

    def draw_more(self, domain: str, n: int) -> list[Prompt]:
        """Up to `n` further prompts of one domain for the step of the last `draw`.

        For dynamic sampling (DAPO): replacements do not count towards the domain's share. Fewer
        than `n`, or none, when all others are in the step already or retired: an easy prompt is
        no replacement for one whose answers were all alike.

        Raises:
            ConfigError: n < 1, or a domain that is unknown or has weight 0.
        """
        if n < 1:
            raise ConfigError(f"draw_more draws at least 1 prompt, got {n}")
        stream = self._streams.get(domain)
        if stream is None or stream.share == 0:
            known = ", ".join(repr(s.name) for s in self._streams.values() if s.share > 0)
            raise ConfigError(f"no prompts are drawn of domain {domain!r}; those drawn: {known}")
        count = min(n, stream.left())
        return stream.take(count, max(0, self._steps - 1)) if count else []

    def take_back(self) -> None:
        """Undo the last `draw` and every `draw_more` since; no verdict may have been recorded."""
        for stream in self._streams.values():
            stream.take_back()
        self._steps -= 1

    def record(self, prompt_id: str, passed: int, judged: int) -> None:
        """What the verifier said of one prompt's samples: `passed` of `judged` are right.

        Samples without a verdict are not judged: a failed verifier is never a wrong answer.

        Raises:
            DataError: an id that is none of the prompts', or counts that cannot be.
        """
        if prompt_id not in self._places:
            raise DataError(f"verdicts for {prompt_id!r}, which is no prompt of this run")
        if not 0 <= passed <= judged:
            raise DataError(
                f"prompt {prompt_id!r}: expected 0 <= passed <= judged, got {passed} of {judged}"
            )
        stream, index = self._places[prompt_id]
        stream.record(index, passed, judged)

    def metrics(self) -> dict[str, float]:
        """Per domain: mean of the prompts' recorded pass rates (once there is one); retired
        prompts and reopenings if prompts are retired; the open share of a curriculum."""
        metrics: dict[str, float] = {}
        for name, stream in self._streams.items():
            key, history = f"domain/{name}", stream.history
            if (rate := history.mean_pass_rate()) is not None:
                metrics[f"{key}/recorded_pass_rate"] = rate
            if history.retire_above is not None:
                metrics[f"{key}/retired"] = float(len(history.retired))
                metrics[f"{key}/reopened"] = float(history.reopened)
            if isinstance(stream.order, Curriculum):
                opened = stream.order.open_count(max(0, self._steps - 1))
                metrics[f"{key}/curriculum_open"] = opened / len(stream.prompts)
        return metrics

    def take_warnings(self) -> list[str]:
        """What the user should be told, each thing once; empties the list."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _reopen(self, stream: Stream, count: int) -> None:
        if not stream.history.reopened:
            self._warnings.append(
                f"domain {stream.name!r}: {len(stream.history.retired)} of its "
                f"{len(stream.prompts)} prompts are retired (train.sampling.retire_above "
                f"{stream.history.retire_above}), which leaves too few for the {count} of this "
                "step; all are given back, now and whenever that happens again (metric "
                f"domain/{stream.name}/reopened). Lower the domain's weight or add prompts if it "
                "should not train on what it knows"
            )
        stream.history.reopen()

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
            "sampling": self._rules,
            "steps": self._steps,
            "domains": {name: stream.state_dict() for name, stream in self._streams.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            DataError: the state is of another seed, of other domains, prompts, shares or sampling
                rules (named), or was written before there were sampling rules.
        """
        self._require_same(state)
        self._steps = int(state["steps"])
        self._warnings = []
        for name, stream in self._streams.items():
            stream.load_state_dict(state["domains"][name])

    def _require_same(self, state: Mapping[str, Any]) -> None:
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
        if "sampling" not in state:
            raise DataError(
                "the checkpoint was made by an older version of mopd, without the state of the "
                "sampling rules (pass counts, retired prompts, positions); go on with the version "
                "that made it, or start a run of another name"
            )
        for name, stream in self._streams.items():
            stream.require_same(saved[name])
        require_same_rules(state["sampling"], self._rules)
