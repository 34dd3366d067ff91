"""What an objective has to be given: whom a run must ask for what. Imports no torch."""

from __future__ import annotations

from mopd.config.objective import ObjectiveConfig
from mopd.config.schema import Config
from mopd.objective_names import POLICY_LOSS_SPECS, SUPPORT


def needs_teacher(objective: ObjectiveConfig) -> bool:
    """Whether the objective reads the logprobs of each sample's own teacher."""
    own_reference = objective.kl.kind != "none" and objective.kl.reference is None
    return objective.teacher.weight > 0 or own_reference


def support_of(objective: ObjectiveConfig) -> str:
    """Whose top-k the teachers are asked about: teacher or student."""
    return objective.teacher.support or SUPPORT


def teacher_top_k(objective: ObjectiveConfig) -> int:
    """Ids a position whose logprobs the teachers give besides the sampled one's."""
    return objective.teacher.top_k or 0 if objective.teacher.signal == "topk" else 0


def sampler_top_k(objective: ObjectiveConfig) -> int:
    """Ids a position whose logprobs the rollout engines give besides the sampled one's."""
    asked = teacher_top_k(objective) > 0 and support_of(objective) == "student"
    if asked or POLICY_LOSS_SPECS[objective.loss.name].needs_topk:
        return objective.teacher.top_k or 0
    return 0


def alphas(config: Config) -> dict[str, float]:
    """Domain -> its alpha."""
    default = config.objective.orm.alpha
    return {
        name: default if domain.alpha is None else domain.alpha
        for name, domain in config.domains.items()
    }
