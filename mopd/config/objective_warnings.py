"""What of an objective runs but is probably not meant."""

from __future__ import annotations

from collections.abc import Iterator

from mopd.config.objective_needs import alphas
from mopd.config.schema import Config
from mopd.objective_names import POLICY_LOSS_SPECS


def objective_warnings(config: Config) -> Iterator[str]:
    """One sentence each, of a configuration that `check_config` finds nothing wrong with."""
    objective, train = config.objective, config.train
    updates = train.epochs * train.minibatches
    spec = POLICY_LOSS_SPECS[objective.loss.name]  # names are checked before anyone warns
    if updates == 1 and spec.carries_ratio and "clip_high" in spec.parameters:
        yield (
            f"objective.loss.name is {objective.loss.name} with one update a step "
            "(train.epochs * train.minibatches = 1): pi equals pi_old, so its clip never acts"
        )
    rewarded = any(alpha > 0 for alpha in alphas(config).values())
    if updates == 1 and objective.teacher.weight > 0 and not objective.teacher.refresh:
        yield (
            "objective.teacher.refresh is false with one update a step: there is nothing to take "
            "anew, so it does nothing"
        )
    if updates > 1 and spec.parameters == {} and objective.truncation.kind == "none":
        yield (
            f"objective.loss.name {objective.loss.name} with {updates} updates a step and "
            "objective.truncation.kind none: no ratio corrects the later updates for samples that "
            "an older policy gave; take a truncation (raw, icepop, ...), or one update"
        )
    if objective.teacher.weight > 0 and objective.teacher.signal != "sampled" and not rewarded:
        if objective.loss.name != "mopd":
            yield (
                f"objective.loss.name is {objective.loss.name}, but the only gradient is that of "
                f"objective.teacher.signal {objective.teacher.signal}: no domain has an alpha, so "
                "the policy loss has no advantage to weigh"
            )
    if config.train.sampling.dynamic_rounds > 0 and objective.teacher.weight > 0 and not rewarded:
        yield (
            "train.sampling.dynamic_rounds draws again what every sample got equally right or "
            "wrong, and no domain has an alpha: the teachers' opinion of the answers that are "
            "replaced is lost for nothing"
        )
    if objective.balance.kind != "none" and len(config.domains) < 2:
        yield f"objective.balance.kind is {objective.balance.kind} with one domain: it does nothing"
    if objective.orm.alpha >= 1 and objective.teacher.weight > 0:
        yield (
            f"objective.orm.alpha is {objective.orm.alpha:g}: the teacher's part is about 0.04 "
            "nats a token near the teacher, so that outcome rewards decide nearly alone"
        )
