"""Train the quickstart's models by several objectives and draw what each of them reaches.

    python tools/compare_objectives.py orm          MOPD without ORM, with ORM, ORM alone
    python tools/compare_objectives.py starvation   a domain of few tokens under each balance rule
                                                    (makes tools/make_long_answers.py's models)

Each run is `mopd train` on a configuration of this repository, in --run-dir. A finished run is
read, an interrupted one goes on, so that the tool can be stopped and started again. Writes
docs/objectives/NAME.svg and docs/objectives/NAME.md (the numbers and the command).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "configs/quickstart.yaml"
LONG_ANSWERS = "long_answers"  # in --run-dir: what tools/make_long_answers.py writes


@dataclass(frozen=True)
class Run:
    """One curve: a label and what is laid over the quickstart."""

    label: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs that differ in the objective alone."""

    title: str
    common: tuple[str, ...]
    runs: tuple[Run, ...]
    domains: tuple[str, ...]
    steps: int
    config: str = QUICKSTART
    """A file of this repository, or `LONG_ANSWERS`."""


QUIET = ("train.checkpoint_every=1000", "train.keep_checkpoints=1")
SMALL_SHARE = (
    "domains.backward.weight=1",
    "domains.caesar.weight=4",
    "train.prompts_per_step=60",
    "student.optimizer.lr=6.0e-5",
)
"""A fifth of the prompts and, with answers of 6 tokens beside 44, one token in thirty, as
Open-MOPD's starved domain had 20.3 % of the prompts and 0.99 % of the tokens."""
TOKEN = "objective.aggregation=token"

COMPARISONS = {
    "orm": Comparison(
        "Outcome rewards beside the teachers",
        QUIET,
        (
            Run("MOPD without ORM", ("configs/recipes/mopd_no_orm.yaml",)),
            Run("MOPD with ORM", ("configs/recipes/mopd.yaml",)),
            Run("ORM alone", ("objective.teacher.weight=0", "objective.orm.alpha=1")),
        ),
        ("backward", "rotate", "caesar"),
        100,
    ),
    "starvation": Comparison(
        "Short answers beside long ones",
        (*QUIET, *SMALL_SHARE),
        (
            Run("token mean", (TOKEN,)),
            Run("token mean, token_share", (TOKEN, "objective.balance.kind=token_share")),
            Run("token mean, gap", (TOKEN, "objective.balance.kind=gap")),
            Run("sequence mean", ()),
        ),
        ("backward", "caesar"),
        40,
        LONG_ANSWERS,
    ),
}


def run_name(comparison: str, label: str) -> str:
    return f"{comparison}-" + "-".join(label.replace(",", "").replace("_", "-").lower().split())


def train(comparison: str, run: Run, run_dir: Path, extra: Sequence[str]) -> Path:
    """Train one run, or go on with it; returns its folder."""
    plan = COMPARISONS[comparison]
    folder = run_dir / run_name(comparison, run.label)
    if (folder / "retention.json").exists():
        return folder
    config = plan.config
    if config == LONG_ANSWERS:
        config = str(run_dir / LONG_ANSWERS / "config.yaml")
        if not Path(config).exists():
            maker = (sys.executable, "tools/make_long_answers.py", "--out")
            subprocess.run([*maker, str(run_dir / LONG_ANSWERS)], cwd=ROOT, check=True)
    command = [
        *(sys.executable, "-m", "mopd.cli", "train", config),
        *(change for change in (*plan.common, *run.changes) if change.endswith(".yaml")),
        *(change for change in (*plan.common, *run.changes) if not change.endswith(".yaml")),
        f"train.steps={plan.steps}",
        "evaluation.every=10",
        f"run_dir={run_dir}",
        f"name={folder.name}",
        "resume=true",
        *extra,
        "--plain",
    ]
    print(f"{run.label}: {' '.join(command[3:])}", flush=True)
    start = time.monotonic()
    with (run_dir / f"{folder.name}.log").open("a") as log:
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
    if code != 0:
        raise SystemExit(f"{run.label} ended with code {code}; see {log.name}")
    print(f"{run.label}: {time.monotonic() - start:.0f} s", flush=True)
    return folder


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(folder: Path, domain: str) -> list[tuple[int, float]]:
    """(step, held-out exact match) of the student, its base first."""
    rows = json_lines(folder / "evaluations.jsonl")
    return sorted(
        (row["step"], row["correct"])
        for row in rows
        if row["domain"] == domain and row["who"] in ("base", "student")
    )


def share(folder: Path, domain: str, key: str) -> float:
    """Mean over the steps of a per-domain metric."""
    values = [row[f"domain/{domain}/{key}"] for row in json_lines(folder / "metrics.jsonl")]
    return sum(values) / len(values)


def draw(comparison: str, folders: dict[str, Path], target: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    plan = COMPARISONS[comparison]
    figure, axes = pyplot.subplots(
        1, len(plan.domains), figsize=(4 * len(plan.domains), 3.2), sharey=True
    )
    for axis, domain in zip(axes, plan.domains, strict=True):
        for label, folder in folders.items():
            points = curve(folder, domain)
            axis.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.6)
        entry = json.loads((folder / "retention.json").read_text())["domains"][domain]
        axis.axhline(entry["teacher"], color="0.4", linestyle="--", linewidth=1)
        axis.text(0, entry["teacher"], " teacher", color="0.4", fontsize=8, va="bottom")
        axis.set_title(domain)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("held-out exact match")
    axes[-1].legend(fontsize=8, loc="lower right")
    figure.suptitle(plan.title)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def table(comparison: str, folders: dict[str, Path]) -> str:
    """Markdown: what each run reached, and what each domain had of it."""
    plan = COMPARISONS[comparison]
    columns = ["run", *(f"{d}: half-way, end, headroom captured" for d in plan.domains)]
    columns += [f"{d}: prompt / token / gradient share" for d in plan.domains]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for label, folder in folders.items():
        domains = json.loads((folder / "retention.json").read_text())["domains"]
        cells = [label]
        for domain in plan.domains:
            entry, points = domains[domain], curve(folder, domain)
            half = next(y for x, y in points if x >= plan.steps // 2)
            captured, (low, high) = entry["headroom_captured"], entry["ci95"]
            cells.append(
                f"{half:.3f}, {entry['student']:.3f}, {captured:.2f} [{low:.2f}, {high:.2f}]"
            )
        for domain in plan.domains:
            keys = ("prompt_share", "token_share", "gradient_share")
            cells.append(" / ".join(f"{share(folder, domain, key):.1%}" for key in keys))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "compare")
    parser.add_argument("--extra", nargs="*", default=[], help="further key=value for every run")
    arguments = parser.parse_args()
    arguments.run_dir.mkdir(parents=True, exist_ok=True)
    name = arguments.comparison
    plan = COMPARISONS[name]
    folders = {
        run.label: train(name, run, arguments.run_dir.resolve(), arguments.extra)
        for run in plan.runs
    }
    target = ROOT / "docs" / "objectives"
    target.mkdir(parents=True, exist_ok=True)
    draw(name, folders, target / f"{name}.svg")
    text = (
        f"# {plan.title}\n\n{plan.steps} steps, 400 held-out items a domain, one seed, by "
        f"`python tools/compare_objectives.py {name}`.\n\n"
        f"![{plan.title}]({name}.svg)\n\n{table(name, folders)}\n"
    )
    (target / f"{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
