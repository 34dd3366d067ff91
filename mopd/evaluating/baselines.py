"""Baselines that need no training, beside the student: merged teachers.

    weight average     the mean of the teachers that have the base's architecture
    task arithmetic    base + scale * sum(teacher - base), the scale chosen on validation prompts

Validation prompts are taken from the training prompts, which no merge was fitted to; held-out
items decide nothing. The merged checkpoints stay in ``RUN/baselines``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mopd.build import Prepared
from mopd.config.teachers import members_of
from mopd.evaluating.answers import Answering
from mopd.evaluating.models import ModelUnderTest, model_in_folder
from mopd.evaluating.work import samplings
from mopd.evaluation.merging import (
    Merge,
    merge_models,
    mergeable,
    task_arithmetic,
    weight_average,
    write_note,
)
from mopd.evaluation.outcome import scored_items
from mopd.evaluation.selection import domain_rates
from mopd.model_folders import teacher_folders
from mopd.observe.progress import Progress
from mopd.types import Prompt

SCALES = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""Tried for task arithmetic; 1/n is the average."""
VALIDATION_ITEMS = 100
"""Prompts a domain on which the scale is chosen."""


def merged_baselines(
    prepared: Prepared, progress: Progress, folder: Path
) -> tuple[dict[str, str], list[str]]:
    """Make the merged checkpoints; (name -> folder of those to evaluate, what could not be).

    Args:
        folder: where they go; made if missing.
    """
    base = Path(prepared.config.student.model)
    config = prepared.config
    used = {m for d in config.domains.values() for m in members_of(config, d.teacher)}
    local = {n: path for n, path in teacher_folders(prepared.config).items() if n in used}
    fitting, reasons = mergeable(base, local)
    reasons += [f"teacher {n} has no checkpoint on this machine" for n in used - set(local)]
    if not fitting:
        return {}, [*reasons, "no merged baseline can be made"]
    folder.mkdir(parents=True, exist_ok=True)

    def made(name: str, merge: Merge, what: str) -> Path:
        out = folder / name
        merge_models(base, list(fitting.values()), merge, out)
        write_note(out, what, base, fitting)
        return out

    found = {"weight average": str(made("weight_average", weight_average, "weight average"))}
    scales = sorted({*SCALES, round(1 / len(fitting), 3)})
    candidates = {
        scale: made(
            f"task_arithmetic_{scale:g}",
            task_arithmetic(scale),
            f"task arithmetic, scale {scale:g}",
        )
        for scale in scales
    }
    scores = _validated(prepared, progress, candidates)
    best = max(scores, key=lambda scale: scores[scale])
    progress.note(
        "task arithmetic on validation prompts: "
        + ", ".join(f"{scale:g}: {score:.3f}" for scale, score in scores.items())
        + f"; scale {best:g} is taken"
    )
    found[f"task arithmetic {best:g}"] = str(candidates[best])
    return found, reasons


def _validated(
    prepared: Prepared, progress: Progress, candidates: Mapping[float, Path]
) -> dict[float, float]:
    """Mean over the domains of each candidate's exact match on validation prompts."""
    sets = {
        name: scored_items(data.train, VALIDATION_ITEMS) for name, data in prepared.domains.items()
    }
    models = [_candidate(prepared, scale, path, sets) for scale, path in candidates.items()]
    greedy = [s for s in samplings(prepared.config) if s.name == "greedy"]
    answering = Answering(prepared, progress, models, greedy)
    asyncio.run(answering.fill())
    scores = {}
    for scale, answers in zip(candidates, answering.results().values(), strict=True):
        rates = domain_rates(answers, {name: [name] for name in sets})
        scores[scale] = math.fsum(rates.values()) / len(rates) if rates else 0.0
    return scores


def _candidate(
    prepared: Prepared, scale: float, path: Path, sets: Mapping[str, Sequence[Prompt]]
) -> ModelUnderTest:
    model = model_in_folder(prepared, f"scale {scale:g}", "other", path, sets)
    return replace(model, tokenizer=prepared.tokenizer)
