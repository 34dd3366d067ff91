"""The retention result as a Markdown and as a terminal table: the same cells in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

COLUMNS = (
    "domain", "majority", "base", "teacher", "student", "retention", "p (teacher)",
    "headroom captured [95%]", "n",
)  # fmt: skip
NONE = "–"


def number(value: float | None, digits: int = 3) -> str:
    """``0.937``; a dash where there is no value."""
    return NONE if value is None else f"{value:.{digits}f}"


def with_interval(value: float | None, ci95: Sequence[float | None] | None) -> str:
    """``0.937 [0.901, 0.962]``; an end that could not be estimated is a dash."""
    if value is None or ci95 is None or all(end is None for end in ci95):
        return number(value)
    return f"{number(value)} [{number(ci95[0])}, {number(ci95[1])}]"


def captured_cell(entry: Mapping[str, Any]) -> str:
    """Headroom captured with its interval, or why there is none."""
    if entry["headroom_captured"] is not None:
        return with_interval(entry["headroom_captured"], entry["ci95"])
    return "not scored" if entry["student"] is None else "not measurable"


def _p_cell(entry: Mapping[str, Any]) -> str:
    """p-value of the student against its teacher on the same items."""
    found = (entry.get("tests") or {}).get("student_against_teacher")
    return NONE if found is None else f"{found['p']:.2g}"


def retention_rows(retention: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a domain in the order of `COLUMNS`, then the means."""
    rows: list[tuple[str, ...]] = [
        (
            name,
            number(entry.get("majority_baseline")),
            number(entry["base"]),
            number(entry["teacher"]),
            number(entry["student"]),
            number(entry["retention"]),
            _p_cell(entry),
            captured_cell(entry),
            str(entry["n"]),
        )
        for name, entry in retention["domains"].items()
    ]
    mean = with_interval(retention["mean_headroom_captured"], retention.get("mean_headroom_ci95"))
    kept = number(retention.get("mean_retention"))
    rows.append(("mean", "", "", "", "", kept, "", mean, ""))
    return rows


def retention_notes(retention: Mapping[str, Any]) -> list[str]:
    """What the table alone would hide, one sentence each."""
    notes = []
    for name, entry in retention["domains"].items():
        if entry.get("not_measurable_reason"):
            notes.append(f"{name}: headroom not measurable: {entry['not_measurable_reason']}.")
        if (entry.get("only_format") or {}).get("flagged"):
            change = with_interval(entry["only_format"]["change"], entry["only_format"]["ci95"])
            notes.append(
                f"{name}: the gain over the base is one of form: where the reference may stand "
                f"anywhere in the answer, student - base = {change}."
            )
        if entry["n"] and entry.get("n_unscored"):
            notes.append(f"{name}: {entry['n_unscored']} items could not be judged, left out.")
    for name, entry in retention.get("forgetting", {}).items():
        change = with_interval(entry["forgetting"], entry["ci95"])
        notes.append(f"{name} (no teacher): student - base = {change}, n = {entry['n']}.")
    return notes


def retention_markdown(retention: Mapping[str, Any]) -> str:
    """A GitHub Markdown table followed by its notes."""
    notes = [f"- {_escaped(note)}" for note in retention_notes(retention)]
    table = markdown_table(COLUMNS, retention_rows(retention))
    return "\n".join([table, *([""] if notes else []), *notes]) + "\n"


def retention_table(retention: Mapping[str, Any]) -> Table:
    """A rich table; `retention_notes` go under it."""
    table = Table(title="Retention on held-out items", title_justify="left")
    for k, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if k == 0 else "right", no_wrap=k != 0)
    *rows, mean = retention_rows(retention)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    table.add_section()
    table.add_row(*(Text(cell) for cell in mean), style="bold")
    return table


def score_rows(record: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(columns, rows) of every model on every domain: score, and change against the base.

    Args:
        record: the content of evaluation.json.
    """
    table = record["table"]
    domains = list(dict.fromkeys(d for cells in table.values() for d in cells))
    means = record["router"]["models"]
    rows: list[tuple[str, ...]] = []
    for model, cells in table.items():
        row = [model]
        for domain in domains:
            cell = cells.get(domain)
            text = NONE if cell is None else number(cell["score"])
            if cell is not None and cell["change"] is not None:
                text += f" ({cell['change']:+.3f})"
            row.append(text)
        rows.append((*row, number(means.get(model))))
    router = record["router"]["router"]
    if router is not None:
        rows.append(("oracle router", *[""] * len(domains), number(router)))
    return ("model", *domains, "mean"), rows


def score_table(record: Mapping[str, Any]) -> Table:
    """`score_rows` as a rich table."""
    table = Table(title="Every model on every set (change against the base)", title_justify="left")
    columns, rows = score_rows(record)
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub Markdown table: the first column to the left, the others to the right."""
    lines = ["| " + " | ".join(_escaped(c) for c in columns) + " |"]
    lines.append("|---|" + "---:|" * (len(columns) - 1))
    lines += ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
