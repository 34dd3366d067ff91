"""The report's plain tables, each with its title and what to know of it, for both of its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mopd.evaluation import report_methods as methods
from mopd.evaluation import report_sections as sections
from mopd.evaluation.report_figures import stage_rows
from mopd.evaluation.run_files import RunFiles
from mopd.evaluation.tables import markdown_table, score_rows


@dataclass(frozen=True)
class ReportTable:
    """Cells as they are shown, and the note under them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    emphasised: frozenset[int] = frozenset()
    """Rows that stand out: the student among other models, a mean, a sum."""


def report_tables(run: RunFiles) -> dict[str, ReportTable]:
    """By name, in the order of ``report.md``; a table without rows is left out."""
    evaluation = run.evaluation or {}
    scores = score_rows(evaluation) if evaluation.get("table") else ((), [])
    compared, (seed_columns, by_seed) = methods.method_rows(run), methods.seeds(run)
    sampled_columns, sampled = sections.sampled_rows(run)
    unit, cost = sections.cost_unit(run), sections.cost_rows(run)
    failures = [tuple(str(cell) for cell in row) for row in sections.failure_rows(run)]
    found = {
        "significance": ReportTable(
            "Tests on the same items",
            ("set", "against", "student − other", "only student right", "only other right", "p",
             "test"),
            sections.significance_rows(run),
            "Two-sided, not corrected for the number of sets.",
        ),
        "scores": ReportTable(
            "Every model on every set",
            *scores,
            "Exact match, and the change against the base. Oracle router: every domain answered by "
            "its own teacher. Mean: over the domains that have a teacher.",
        ),
        "methods": ReportTable(
            "Was it worth it?",
            methods.METHOD_COLUMNS,
            compared,
            "Simpler ways on the same items. Mean: exact match over the domains; behind it "
            "headroom captured, and the difference of the means with its paired interval. Trained "
            "tokens: response tokens of all steps, of the student or, for SFT, of the teachers; a "
            "merge trains on none. Step seconds are by the clock, each run's on the machine as "
            "busy as it was: compare tokens. Right alone: items that only the model, and only the "
            "student, has right. p: two-sided, over all items.",
            frozenset({0}),
        ),
        "seeds": ReportTable(
            "Other seeds of this recipe",
            seed_columns,
            by_seed,
            "Headroom captured. sd: standard deviation over runs, the share of chance in the "
            "result; the intervals above say what the items allow.",
            frozenset({len(by_seed) - 2, len(by_seed) - 1}),
        ),
        "answers": ReportTable(
            "Beside right and wrong",
            ("set", "partial credit", "counted leniently", "mean tokens", "truncated",
             "format errors", "repetition"),
            sections.answer_rows(run),
            "Each cell: base / teacher / student. Counted leniently: the reference stands "
            "somewhere in the answer. Format errors: empty or cut off. Repetition: share of an "
            "answer's 4-grams that occurred before in it.",
        ),
        "divergence": ReportTable(
            "Distance to the teachers",
            ("domain", "KL(student ‖ teacher), k1", "k3", "answers", "tokens"),
            sections.divergence_rows(run),
            "Nats a token, on answers that the student sampled at temperature 1 to held-out "
            "prompts.",
        ),
        "sampled": ReportTable(
            "Several answers a prompt",
            sampled_columns,
            sampled,
            "Sampled answers; pass@k by the unbiased estimator, 95% intervals over items.",
        ),
        "stages": ReportTable(
            "Where the time goes", ("stage", "median s", "mean s", "share"), stage_rows(run)
        ),
        "cost": ReportTable(
            "What it cost",
            ("stage", "wall s", unit, "share", f"{unit} a point"),
            cost,
            f"{sections.cost_facts(run)} Of the training steps alone: wall seconds times what the "
            "stage's processes reserve. A point: one hundredth of the mean score over the "
            "domains, student − base.".strip(),
            frozenset({len(cost) - 1}),
        ),
        "failures": ReportTable("Failures", ("cause", "samples", "steps"), failures),
    }  # fmt: skip
    return {name: table for name, table in found.items() if table.rows}


def markdown_tables(run: RunFiles) -> list[str]:
    """The same as GitHub Markdown: heading, table, note."""
    return [
        "\n\n".join(
            part
            for part in (
                f"## {table.title}",
                markdown_table(table.columns, table.rows),
                table.note,
            )
            if part
        )
        for table in report_tables(run).values()
    ]
