"""Three kinds of plot as inline SVG: lines, horizontal bars with intervals, stacked columns.

Colours are CSS classes (``c0`` ... ``c7``, ``ink``, ``grid`` ...) that the page defines for light
and dark; text is escaped here; lengths are user units of a viewBox that scales to the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 8
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One series; `colour` is an index of the page's palette."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    markers: bool = False


@dataclass(frozen=True)
class Reference:
    """A dashed horizontal line with its name at the right end."""

    label: str
    y: float
    css: str  # "teacher" | "base"


@dataclass(frozen=True)
class Whisker:
    """A vertical interval at x."""

    x: float
    low: float
    high: float


@dataclass(frozen=True)
class Bar:
    """One horizontal bar; `note` is shown where there is no value."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    colour: int = 0


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) within [low, high], about `count` of them."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.9)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def number(value: float) -> str:
    """Short: ``0.2``, ``150``, ``20k``, ``1.5e-6``."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}".replace("e-0", "e-") if abs(value) < 1000 else f"{value:.0f}"


def averaged(points: Sequence[Point], limit: int = 240) -> list[Point]:
    """At most `limit` points: means of neighbours, so that a long run stays a small file."""
    if len(points) <= limit:
        return list(points)
    width = math.ceil(len(points) / limit)
    groups = [points[k : k + width] for k in range(0, len(points), width)]
    return [(_mean([x for x, _ in g]), _mean([y for _, y in g])) for g in groups]


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of the last `window` values at each point (fewer at the beginning)."""
    values = [y for _, y in points]
    return [(x, _mean(values[max(0, k + 1 - window) : k + 1])) for k, (x, _) in enumerate(points)]


def line_chart(
    lines: Sequence[Line],
    *,
    name: str,
    x_label: str = "step",
    y_range: tuple[float, float] | None = None,
    x_max: float | None = None,
    references: Sequence[Reference] = (),
    whiskers: Sequence[Whisker] = (),
    smooth: int = 1,
    percent: bool = False,
) -> str:
    """Curves over steps. With `smooth` > 1 the values are thin and their running mean is bold.

    Returns "" if there is no point to draw.
    """
    points = [p for line in lines for p in line.points]
    if not points:
        return ""
    width, height, left, top, bottom = 360.0, 216.0, 44.0, 12.0, 36.0
    right = 92.0 if references else 14.0
    low, high = y_range or _range([y for _, y in points] + [r.y for r in references])
    x_high = max([x for x, _ in points] + [w.x for w in whiskers] + [x_max or 1.0])
    x_low = min(0.0, min(x for x, _ in points))
    px = _scale(x_low, x_high, left, width - right)
    py = _scale(low, high, height - bottom, top)

    out = [_open(width, height, name)]
    for tick in ticks(low, high):
        y = py(tick)
        text = f"{tick * 100:.3g}%" if percent else number(tick)
        out.append(_rule(left, y, width - right, y, "gridline"))
        out.append(_text(left - 6, y + 4, text, "tick", "end"))
    for tick in ticks(x_low, x_high):
        out.append(_text(px(tick), height - bottom + 16, number(tick), "tick", "middle"))
    out.append(_text((left + width - right) / 2, height - 4, x_label, "axis", "middle"))
    out.append(_rule(left, height - bottom, width - right, height - bottom, "axisline"))

    shift = _spread([py(r.y) for r in references], 13.0)
    for reference, text_y in zip(references, shift, strict=True):
        y = py(reference.y)
        out.append(_rule(left, y, width - right, y, f"ref {reference.css}"))
        text = f"{reference.label} {reference.y:.3f}"
        out.append(_text(width - right + 6, text_y + 4, text, f"reflabel {reference.css}", "start"))
    for line in lines:
        drawn = averaged(line.points)
        thin = " faint" if smooth > 1 else ""
        out.append(_path([(px(x), py(y)) for x, y in drawn], f"line c{line.colour}{thin}"))
        if smooth > 1:
            bold = averaged(running_mean(line.points, smooth))
            out.append(_path([(px(x), py(y)) for x, y in bold], f"line c{line.colour}"))
        if line.markers:
            for x, y in line.points:
                title = f"{line.label}, {x_label} {x:g}: {y:.4g}"
                out.append(
                    f'<circle class="dot f{line.colour}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.2">'
                    f"<title>{escape(title)}</title></circle>"
                )
    for w in whiskers:
        x, y0, y1 = px(w.x), py(w.low), py(w.high)
        out.append(_rule(x, y0, x, y1, "whisker"))
        out += [_rule(x - 4, y, x + 4, y, "whisker") for y in (y0, y1)]
    return "".join([*out, "</svg>"])


def bar_chart(bars: Sequence[Bar], *, name: str, reference: float = 1.0) -> str:
    """One bar a row with its 95% interval; `reference` (the teacher) is a dashed line."""
    width, left, right, row = 420.0, 4.0, 10.0, 40.0
    top, height = 18.0, 18.0 + 40.0 * len(bars) + 22.0
    ends = [
        v for b in bars if b.value is not None for v in (b.value, b.low, b.high) if v is not None
    ]
    low, high = min([0.0, *ends]), max([reference * 1.05, *ends])
    px = _scale(low, high, left, width - right)
    base_y = height - 20.0

    def across(value: float, css: str) -> list[str]:
        """A vertical line beside the bars only, so that it crosses no text."""
        x, starts = px(value), [top + row * k + 17 for k in range(len(bars))]
        return [_rule(x, y, x, y + 16, css) for y in starts]

    out = [_open(width, height, name)]
    for tick in ticks(low, high):
        out += across(tick, "gridline")
        anchor = "start" if px(tick) < left + 8 else "middle"
        out.append(_text(px(tick), base_y + 15, number(tick), "tick", anchor))
    for k, bar in enumerate(bars):
        y = top + row * k
        out.append(_text(left, y + 13, bar.label, "barlabel", "start"))
        if bar.value is None:
            out.append(_text(width - right, y + 13, bar.note, "tick", "end"))
            continue
        ci = f" [{_end(bar.low)}, {_end(bar.high)}]" if (bar.low, bar.high) != (None, None) else ""
        out.append(_text(width - right, y + 13, f"{bar.value:.3f}{ci}", "barvalue", "end"))
        x0, x1 = sorted((px(0.0), px(bar.value)))
        out.append(
            f'<rect class="f{bar.colour}" x="{x0:.1f}" y="{y + 19:.1f}" width="{x1 - x0:.1f}" '
            f'height="12" rx="2"><title>{escape(bar.label)}: {bar.value:.4f}{ci}</title></rect>'
        )
        if bar.low is not None and bar.high is not None:
            a, b, mid = px(bar.low), px(bar.high), y + 25
            out.append(_rule(a, mid, b, mid, "whisker"))
            out += [_rule(x, mid - 4, x, mid + 4, "whisker") for x in (a, b)]
    out += across(0.0, "axisline") + across(reference, "ref teacher")
    out.append(_text(px(reference), top - 5, "teacher = 1", "reflabel teacher", "end"))
    return "".join([*out, "</svg>"])


def stacked_chart(
    names: Sequence[str],
    columns: Sequence[tuple[float, Sequence[float]]],
    *,
    name: str,
    unit: str = "s",
    limit: int = 60,
) -> str:
    """Stacked columns, e.g. seconds by stage over steps; neighbours are averaged past `limit`."""
    if not columns:
        return ""
    width, height, left, right, top, bottom = 420.0, 224.0, 44.0, 14.0, 12.0, 36.0
    group = math.ceil(len(columns) / limit)
    cells = []
    for k in range(0, len(columns), group):
        part = columns[k : k + group]
        cells.append((part[0][0], part[-1][0], [_mean(v) for v in zip(*(c for _, c in part),
                                                                      strict=True)]))  # fmt: skip
    high = max(sum(values) for _, _, values in cells) * 1.05 or 1.0
    py = _scale(0.0, high, height - bottom, top)
    slot = (width - left - right) / len(cells)

    out = [_open(width, height, name)]
    for tick in ticks(0.0, high):
        out.append(_rule(left, py(tick), width - right, py(tick), "gridline"))
        out.append(_text(left - 6, py(tick) + 4, f"{number(tick)} {unit}", "tick", "end"))
    for k, (first, last, values) in enumerate(cells):
        x, bottom_value = left + slot * k, 0.0
        steps = f"{first:g}" if first == last else f"{first:g}–{last:g}"
        for colour, (label, value) in enumerate(zip(names, values, strict=True)):
            if value <= 0:
                continue
            y0, y1 = py(bottom_value), py(bottom_value + value)
            bottom_value += value
            out.append(
                f'<rect class="f{colour % COLOURS}" x="{x + slot * 0.06:.2f}" y="{y1:.2f}" '
                f'width="{slot * 0.88:.2f}" height="{max(0.0, y0 - y1):.2f}"><title>step '
                f"{steps}, {escape(label)}: {value:.3g} {unit}</title></rect>"
            )
    spread = _scale(0, len(cells), left, width - right)
    for k in sorted({0, len(cells) // 2, len(cells) - 1}):
        x = spread(k + 0.5)
        out.append(_text(x, height - bottom + 16, number(cells[k][0]), "tick", "middle"))
    out.append(_rule(left, height - bottom, width - right, height - bottom, "axisline"))
    out.append(_text((left + width - right) / 2, height - 4, "step", "axis", "middle"))
    return "".join([*out, "</svg>"])


# --- small parts ---


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _end(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The values' span with some air; from 0 where that is near."""
    low, high = min(values), max(values)
    if low >= 0 and low < 0.5 * high:
        low = 0.0
    air = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - air), high + air


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _spread(positions: Sequence[float], gap: float) -> list[float]:
    """Push labels apart that would overlap, around their common middle."""
    if len(positions) != 2 or abs(positions[0] - positions[1]) >= gap:
        return list(positions)
    middle = sum(positions) / 2
    upper = 0 if positions[0] <= positions[1] else 1
    return [middle - gap / 2 if k == upper else middle + gap / 2 for k in (0, 1)]


def _open(width: float, height: float, name: str) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(name)}">'


def _rule(x0: float, y0: float, x1: float, y1: float, css: str) -> str:
    return f'<line class="{css}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'


def _text(x: float, y: float, text: str, css: str, anchor: str) -> str:
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _path(points: Sequence[Point], css: str) -> str:
    steps = " ".join(f"{'L' if k else 'M'}{x:.1f} {y:.1f}" for k, (x, y) in enumerate(points))
    return f'<path class="{css}" d="{steps}"/>'
