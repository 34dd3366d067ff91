"""A thorough look at a teacher that answers: what a run would only notice by its results.

Each finding is one question with its answer in numbers. A failed one means that the teacher's
scores cannot be trusted, whatever they are.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mopd_teachers.client import TeacherClient
from mopd_teachers.errors import TeacherError
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure

_SAMPLES = 16
_SPEED_SAMPLES = 64
_SINGLE = 5
_LONGEST = 216  # tokens
_MIN_SPREAD = 0.05  # nats

Reference = Callable[[ScoreItem], Sequence[float]]
"""Logprobs of an item's response ids by the checkpoint itself."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One question and its answer."""

    what: str
    good: bool
    detail: str


async def examine(
    client: TeacherClient,
    *,
    vocabulary: int,
    tolerance: float,
    reference: Reference | None = None,
    wait_s: float = 0.0,
    told: Callable[[str], None] = lambda text: None,
) -> list[Finding]:
    """Probe the teacher and put it to the test. Ids are drawn below `vocabulary`; scores of the
    same tokens may differ by `tolerance` nats. `wait_s`, `told`: see `TeacherClient.probe`.

    Raises TeacherError when it does not answer, or is not the model it should be.
    """
    report = await client.probe(wait_s=wait_s, told=told)
    findings = [
        Finding(
            "identity",
            True,
            f"serves {', '.join(report.models)}; context {report.max_model_len} tokens; can score: "
            + ", ".join(sorted(report.capabilities))
            + ("" if report.fast_route else "; a plain vLLM server, at its own speed"),
        )
    ]
    items = _items(_SAMPLES, vocabulary, report.max_model_len)
    base = await _scores(client, items)

    def compare(what: str, others: Mapping[str, np.ndarray]) -> None:
        apart = max(float(np.abs(base[key] - other).max()) for key, other in others.items())
        findings.append(
            Finding(what, apart <= tolerance, f"{apart:.2g} nats apart (at most {tolerance:g})")
        )

    compare("the same twice", await _scores(client, items))
    compare("in another order", await _scores(client, items[::-1]))
    alone: dict[str, np.ndarray] = {}
    for item in items[:_SINGLE]:
        alone |= await _scores(client, [item])
    compare("alone or in a batch", alone)
    compare("prompt and response cut elsewhere", await _recut(client, items))
    # Answers fill the cache of what prompts begin with; no score may come out of it.
    await client.generate([item.prompt_ids for item in items], max_tokens=1)
    compare("with the beginnings in the prefix cache", await _scores(client, items))
    values = np.concatenate(list(base.values()))
    spread, mean = float(np.ptp(values)), float(values.mean())
    findings.append(
        Finding(
            "not one value for all",
            spread > _MIN_SPREAD,
            f"spread {spread:.2f} nats about {mean:.2f}; a model without weights gives every token "
            f"{-math.log(vocabulary):.2f}",
        )
    )
    if reference is not None:
        own = {i.sample_id: np.asarray(reference(i), np.float32) for i in items}
        compare("as the checkpoint itself says", own)
    findings.append(await _speed(client, vocabulary, report.max_model_len))
    return findings


def _items(count: int, vocabulary: int, context: int) -> list[ScoreItem]:
    """Random sequences; half of them share a beginning, of more than a block (128 tokens on a CPU)
    of a prefix cache where the context has room for it."""
    rng = random.Random(0)
    longest = min(_LONGEST, context - 1)
    part = max(1, longest // 6)
    shared = [rng.randrange(vocabulary) for _ in range(longest - 2 * part)]
    items = []
    for i in range(count):
        prompt = list(shared) if i % 2 else []
        prompt += [rng.randrange(vocabulary) for _ in range(rng.randint(1, part))]
        response = [rng.randrange(vocabulary) for _ in range(rng.randint(min(2, part), part))]
        items.append(ScoreItem(str(i), prompt, response))
    return items


async def _scores(client: TeacherClient, items: Sequence[ScoreItem]) -> dict[str, np.ndarray]:
    outcomes: dict[str, Outcome] = await client.score_batch(items)
    scores = {}
    for key, outcome in outcomes.items():
        if isinstance(outcome, TeacherFailure):
            raise TeacherError(f"teacher {client.name!r}: no score of a probe: {outcome.detail}")
        scores[key] = outcome.logprobs
    return scores


async def _recut(client: TeacherClient, items: Sequence[ScoreItem]) -> dict[str, np.ndarray]:
    """The same tokens with all but the first one called response: the tail must be the same."""
    moved = [
        ScoreItem(i.sample_id, i.prompt_ids[:1], [*i.prompt_ids[1:], *i.response_ids])
        for i in items
    ]
    scores = await _scores(client, moved)
    return {i.sample_id: scores[i.sample_id][-len(i.response_ids) :] for i in items}


async def _speed(client: TeacherClient, vocabulary: int, context: int) -> Finding:
    rng = random.Random(1)
    length = min(256, context - 1)
    items = [
        ScoreItem(str(i), [1], [rng.randrange(vocabulary) for _ in range(length - 1)])
        for i in range(_SPEED_SAMPLES)
    ]
    begin = time.perf_counter()
    await _scores(client, items[:1])
    single = time.perf_counter() - begin
    begin = time.perf_counter()
    await _scores(client, items)
    rate = _SPEED_SAMPLES * length / (time.perf_counter() - begin)
    return Finding(
        "speed", True, f"{single * 1000:.0f} ms for {length} tokens alone, {rate:,.0f} tokens/s"
    )
