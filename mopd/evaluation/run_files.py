"""Reads what a run left in its directory, finished or not; nothing here needs the run's parts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mopd.errors import DataError
from mopd.evaluation.record_shapes import Best, Evaluation, Retention, read_json

Record = dict[str, Any]
WARNINGS = "warnings.jsonl"
"""Every warning of a run or an evaluation, as it was shown."""
CONFIG, EVALUATION_CONFIG = "config.yaml", "evaluation.yaml"
"""What a run was trained with; what its last evaluation by `mopd evaluate` was made with."""


def config_file(run_dir: Path) -> Path:
    """Where the configuration of a run is, or of an evaluation without one."""
    trained = run_dir / CONFIG
    made = run_dir / EVALUATION_CONFIG
    return made if made.exists() and not trained.exists() else trained


@dataclass
class RunFiles:
    """The records of one run; empty where a file is missing."""

    run_dir: Path
    config_text: str = ""
    config: Record = field(default_factory=dict)
    metrics: list[Record] = field(default_factory=list)
    """One a step, in order; where a step is there twice, the later line."""
    evaluations: list[Record] = field(default_factory=list)
    """One a (step, who, domain), in order of steps."""
    retention: Record | None = None
    evaluation: Record | None = None
    """Every model on every set, where that was evaluated."""
    best: Record | None = None
    """The best evaluated student: step, criterion, value, domain."""
    samples: list[Record] = field(default_factory=list)
    """Held-out answers of base, teacher and student side by side."""
    transcripts: list[Record] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    """What the run warned of, each text once."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, in words."""
    damaged: list[str] = field(default_factory=list)
    """Those of them that say of a file that it is there and cannot be used."""

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.run_dir.resolve().name)

    @property
    def steps_done(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def steps_planned(self) -> int | None:
        train = self.config.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        return steps if isinstance(steps, int) else None

    @property
    def domains(self) -> list[str]:
        """In the configuration's order, then any further one in the order of its first record."""
        names: dict[str, None] = {}
        configured = self.config.get("domains")
        if isinstance(configured, dict):
            names.update(dict.fromkeys(configured))
        if self.retention is not None:
            names.update(dict.fromkeys(self.retention["domains"]))
            names.update(dict.fromkeys(self.retention.get("forgetting") or {}))
        names.update(dict.fromkeys(e["domain"] for e in self.evaluations))
        for record in self.metrics:
            for key in record:
                if key.startswith("domain/") and key.count("/") >= 2:
                    names[key[len("domain/") : key.rindex("/")]] = None
        return list(names)

    @property
    def general(self) -> list[str]:
        """Sets without a teacher, on which forgetting is measured."""
        evaluation = self.config.get("evaluation")
        configured = evaluation.get("general") if isinstance(evaluation, dict) else None
        found = dict.fromkeys(configured if isinstance(configured, dict) else ())
        if self.retention is not None:
            found.update(dict.fromkeys(self.retention.get("forgetting") or {}))
        return list(found)

    def curve(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of a metric wherever it has a value."""
        return [(r["step"], r[key]) for r in self.metrics if _is_number(r.get(key))]

    def domain_curve(self, domain: str, key: str) -> list[tuple[float, float]]:
        """The same of ``domain/NAME/key``, without the steps in which the domain had no token
        (its means are written as 0 there)."""
        prefix = f"domain/{domain}/"
        return [
            (r["step"], r[prefix + key])
            for r in self.metrics
            if _is_number(r.get(prefix + key)) and r.get(prefix + "tokens") != 0
        ]


def read_run(run_dir: Path) -> RunFiles:
    """Read whatever is there.

    Raises:
        DataError: the directory is missing or holds no file of a run.
    """
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a directory; expected a run's, such as runs/quickstart")
    names = (
        "config.yaml", "metrics.jsonl", "evaluations.jsonl", "retention.json", "evaluation.json"
    )  # fmt: skip
    if not any((run_dir / name).exists() for name in names):
        raise DataError(f"{run_dir} holds none of {', '.join(names)}: it is not a run's directory")
    run = RunFiles(run_dir)
    _read_config(run)
    by_step = {r["step"]: r for r in _json_lines(run, "metrics.jsonl", ("step",))}
    run.metrics = [by_step[step] for step in sorted(by_step)]
    found = _json_lines(run, "evaluations.jsonl", ("step", "who", "domain"))
    latest = {(e["step"], e["who"], e["domain"]): e for e in found}
    run.evaluations = sorted(latest.values(), key=lambda e: int(e["step"]))
    run.transcripts = _json_lines(
        run, "transcripts.jsonl", ("step", "domain", "prompt", "response"), optional=True
    )
    run.retention = _json_object(run, "retention.json", Retention)
    run.evaluation = _json_object(run, "evaluation.json", Evaluation)
    run.best = _json_object(run, "best.json", Best)
    run.samples = _json_lines(
        run, "samples.jsonl", ("set", "class", "prompt", "answers"), optional=True
    )
    warned = _json_lines(run, WARNINGS, ("text",), optional=True)
    run.warnings = list(dict.fromkeys(str(record["text"]) for record in warned))
    versions = _json_object(run, "versions.json", dict[str, Any]) or {}
    run.versions = {k: str(v) for k, v in versions.items()}
    return run


def _read_config(run: RunFiles) -> None:
    path = config_file(run.run_dir)
    if not path.exists():
        run.problems.append(f"{path.name} is missing.")
        return
    run.config_text = path.read_text(encoding="utf-8", errors="replace")
    try:
        config = yaml.safe_load(run.config_text)
    except yaml.YAMLError as error:
        _damaged(run, f"{path.name} is not YAML: {error}")
        return
    if isinstance(config, dict):
        run.config = config
    else:
        _damaged(run, f"{path.name} does not hold a mapping.")


def _damaged(run: RunFiles, text: str) -> None:
    run.damaged.append(text)
    run.problems.append(text)


def _json_lines(
    run: RunFiles, name: str, needed: tuple[str, ...], *, optional: bool = False
) -> list[Record]:
    path = run.run_dir / name
    if not path.exists():
        if not optional:
            run.problems.append(f"{name} is missing.")
        return []
    found, bad = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            bad += 1
            continue
        usable = isinstance(record, dict) and all(k in record for k in needed)
        if usable and ("step" not in needed or isinstance(record["step"], int)):
            found.append(record)
        else:
            bad += 1
    if bad:
        run.problems.append(f"{name}: {bad} line(s) could not be read (a killed run tears one).")
    return found


def _json_object(run: RunFiles, name: str, shape: Any) -> Record | None:
    path = run.run_dir / name
    if not path.exists():
        return None
    try:
        found: Record = read_json(path.read_text(encoding="utf-8"), shape)
    except ValueError as error:
        _damaged(run, f"{name} is damaged and left out: {error}.")
        return None
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
