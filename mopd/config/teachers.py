"""Which teachers a configuration really asks: mixtures taken apart. Pure reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mopd.config.schema import Config, TeacherConfig

WEIGHTS_SUM_TO = 1e-6  # how near to 1


def members_of(config: Config, name: str) -> Mapping[str, float]:
    """A teacher's members with their weights; a teacher that is no mixture is its own."""
    return config.teachers[name].mixture or {name: 1.0}


def answering(config: Config, name: str) -> str:
    """Who answers prompts in the place of `name`: of a mixture, which is no model that could, the
    member with the largest weight (the first of equal ones)."""
    members = members_of(config, name)
    return max(members, key=lambda member: members[member])


def asked_teachers(config: Config) -> set[str]:
    """Every teacher that is asked for scores: of the domains, and the reference policy. Names that
    `teachers` lacks are left out (the checks tell of them)."""
    named = {domain.teacher for domain in config.domains.values()}
    if config.objective.kl.reference is not None:
        named.add(config.objective.kl.reference)
    known = named & config.teachers.keys()
    return {m for name in known for m in members_of(config, name)} & config.teachers.keys()


def mixture_problems(config: Config, name: str) -> Iterator[str]:
    """What is wrong with the mixture `name`.

    It scores a sampled token by sum_i w_i log T_i, which is log of the geometric mean of the
    members up to a constant of the context (MATH.md, section 3): right for an advantage, where a
    constant of the context changes no expected gradient, and for nothing that needs probabilities.
    """
    teacher, key = config.teachers[name], f"teachers.{name}"
    defaults = TeacherConfig()
    for field, value in vars(teacher).items():
        if field != "mixture" and value != getattr(defaults, field):
            yield f"{key}.{field} has no effect on a mixture: set it on its members"
    for member, weight in teacher.mixture.items():
        if member not in config.teachers or config.teachers[member].mixture or member == name:
            yield f"{key}.mixture: {member!r} is no teacher with servers of its own"
        if not 0 < weight <= 1:
            yield f"{key}.mixture.{member}: {weight:g} is not within (0, 1]"
    total = sum(teacher.mixture.values())
    if abs(total - 1) > WEIGHTS_SUM_TO:
        yield f"{key}.mixture: the weights sum to {total:g}, expected 1"
    if any(domain.teacher == name for domain in config.domains.values()):
        signal = config.objective.teacher.signal
        if config.objective.teacher.weight > 0 and signal != "sampled":
            yield (
                f"{key} is a mixture, which scores sampled tokens alone; objective.teacher.signal "
                f"is {signal}: take sampled, or one teacher"
            )
        if config.rollout.source == "teachers":
            yield f"{key} is a mixture, which gives no answers; rollout.source is teachers"
