"""Which processes a configuration asks for, and what each reserves. Pure reading: no Ray here."""

from __future__ import annotations

from dataclasses import dataclass

from mopd.config.schema import Config
from mopd.config.teachers import asked_teachers


@dataclass(frozen=True)
class Role:
    """One kind of process: how many there are and what each reserves."""

    name: str
    count: int
    cpus: float
    gpus: float


def roles(config: Config) -> list[Role]:
    """Every process the run places, teachers given by URL and those that no domain names
    excepted (the former run elsewhere, the latter are not started)."""
    layout = config.student.parallel
    student, rollout = config.student, config.rollout
    used = asked_teachers(config)
    return [
        Role(
            "student rank",
            layout.dp * layout.tp * layout.pp,
            student.threads_per_rank,
            student.gpus_per_rank,
        ),
        Role(
            "rollout engine", rollout.engines, rollout.threads_per_engine, rollout.gpus_per_engine
        ),
        *(
            Role(f"teacher {name}", teacher.replicas, teacher.threads, teacher.gpus)
            for name, teacher in config.teachers.items()
            if not teacher.endpoints and name in used
        ),
        Role("verifier worker", 1, 1, 0.0),
    ]


def placement_text(config: Config) -> str:
    """``2 x student rank (1 CPU), 1 x teacher math (1 CPU, 1 GPU), ...``"""
    return ", ".join(
        f"{role.count} x {role.name} ({role.cpus:g} CPU"
        + (f", {role.gpus:g} GPU)" if role.gpus else ")")
        for role in roles(config)
    )


def total_reserved(config: Config) -> tuple[float, float]:
    """(CPUs, GPUs) of all roles together."""
    needed = roles(config)
    return sum(r.count * r.cpus for r in needed), sum(r.count * r.gpus for r in needed)
