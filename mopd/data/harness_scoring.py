"""What lm-evaluation-harness says of an answer: its filters, then its metric.

The answer is one in text, or the likelihoods of given choices; the task is `mopd.data.harness`'s.
Written against lm_eval 0.4.13, which is imported only when such a task is really scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.config.wording import nearest
from mopd.errors import ConfigError

_OF_LIKELIHOODS = ("acc", "acc_norm", "acc_bytes")


@dataclass(frozen=True)
class Scoring:
    """Which of a task's numbers counts: a metric, of answers that went through a filter."""

    metric: str
    filter: str


def chosen_scoring(task: Any, metric: str | None, filter_name: str | None, where: str) -> Scoring:
    """The metric and filter that were asked for, or the task's only ones.

    Raises:
        ConfigError: there is no such one, there are several and none was named, or the metric is
            no mean over items of something in which more is better.
    """
    metrics = {m: task.higher_is_better().get(m) for m in task.aggregation()}
    filters = [ensemble.name for ensemble in task._filters]
    chosen = Scoring(
        _one(metric, list(metrics), "metric", where), _one(filter_name, filters, "filter", where)
    )
    choosing = task.get_config("output_type") == "multiple_choice"
    if choosing and chosen.metric not in _OF_LIKELIHOODS:
        raise ConfigError(
            f"{where}.args.metric: {chosen.metric!r} needs more than the choices' likelihoods; "
            f"take one of {', '.join(m for m in metrics if m in _OF_LIKELIHOODS)}"
        )
    if metrics[chosen.metric] is False:
        raise ConfigError(f"{where}.args.metric: of {chosen.metric!r} less is better; no retention")
    from lm_eval.api.registry import get_aggregation

    if task.aggregation()[chosen.metric] is not get_aggregation("mean"):
        raise ConfigError(
            f"{where}.args.metric: {chosen.metric!r} is not a mean over items, so that items "
            "cannot be compared between models; take another metric of the task"
        )
    return chosen


def _one(asked: str | None, known: Sequence[str], what: str, where: str) -> str:
    if asked is None:
        if len(known) == 1:
            return known[0]
        raise ConfigError(
            f"{where}.args.{what}: the task has several, name one of {', '.join(known)}"
        )
    if asked not in known:
        raise ConfigError(
            f"{where}.args.{what}: the task has no {what} {asked!r}{nearest(asked, known)}"
        )
    return asked


def score_answer(task: Any, scoring: Scoring, doc: Mapping[str, Any], answer: str) -> float:
    """The harness' metric of one answer, already cut at the task's stop texts.

    Raises:
        ValueError: process_results gives no such number.
    """
    from lm_eval.api.instance import Instance

    return _scored(
        task, scoring, doc, [Instance("generate_until", dict(doc), ("", {}), 0, resps=[answer])]
    )


def score_choices(
    task: Any, scoring: Scoring, doc: Mapping[str, Any], logprobs: Sequence[float]
) -> float:
    """The harness' metric where the choices have these likelihoods.

    Args:
        logprobs: [choices] log-likelihood of each continuation, nats.

    Raises:
        ValueError: process_results gives no such number.
    """
    from lm_eval.api.instance import Instance

    # Whether a choice is what would be sampled is not known; no metric that is taken asks for it.
    instances = [
        Instance("loglikelihood", dict(doc), ("", ""), k, resps=[(float(value), False)])
        for k, value in enumerate(logprobs)
    ]
    return _scored(task, scoring, doc, instances)


def _scored(task: Any, scoring: Scoring, doc: Mapping[str, Any], instances: Sequence[Any]) -> float:
    for ensemble in task._filters:
        if ensemble.name == scoring.filter:
            ensemble.apply(list(instances))
    said = [instance.filtered_resps[scoring.filter] for instance in instances]
    result = task.process_results(dict(doc), said)
    if scoring.metric not in result:
        raise ValueError(f"process_results gave {sorted(result)}, not {scoring.metric!r}")
    return float(result[scoring.metric])
