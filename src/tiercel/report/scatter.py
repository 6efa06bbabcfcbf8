"""Labelled points over a logarithmic x axis, with the frontier of the best, as inline SVG. No scripts, no
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from tiercel.report.charts import PALETTE, log_ticks

WIDTH, HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 132, 14, 48
_LABEL_HEIGHT = 15.0
# Half a mark, and a little room.
_MARK = 8.0
# A label moved by a whole height is clear of the other, whatever that comes to in a float.
_CLASH = _LABEL_HEIGHT - 0.01


@dataclass(frozen=True, slots=True)
class Point:
    """A point with its label; points of one `group` share a colour and a shape. `told`: shown when pointed
    at.
    """

    label: str
    x: float
    y: float
    group: int
    told: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """`x` above zero, in percent. `log_y`: y is logarithmic and must be above zero, lower is better; else a
    share.

    `groups` names the groups for the legend.
    """

    title: str
    x_label: str
    y_label: str
    points: tuple[Point, ...]
    groups: tuple[str, ...]
    log_y: bool = False


def scatter_svg(chart: Scatter) -> str:
    """Return an `<svg>` element that fills the width it is given."""
    xs = [one.x for one in chart.points] or [1.0, 100.0]
    low, high = min(xs) * 0.85, max(xs) * 1.15
    bottom, top = _y_range(chart)

    def at(one: Point) -> tuple[float, float]:
        share_x = log10(one.x / low) / log10(high / low)
        share_y = (
            log10(one.y / bottom) / log10(top / bottom) if chart.log_y else (one.y - bottom) / (top - bottom)
        )
        x = _LEFT + share_x * (WIDTH - _LEFT - _RIGHT)
        return x, HEIGHT - _BOTTOM - share_y * (HEIGHT - _TOP - _BOTTOM)

    parts = [_grid_x(low, high), _grid_y(chart, bottom, top)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, frontier(chart.points, chart.log_y)))
    parts.append(f'<polyline class="frontier" fill="none" points="{line}"/>')
    places = [at(one) for one in chart.points]
    # Marks come last: a label moved aside must not cover one.
    parts += _labels(chart.points, places)
    parts += [_mark(one, *place) for one, place in zip(chart.points, places, strict=True)]
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, chart.x_label, "middle"))
    middle = _TOP + (HEIGHT - _TOP - _BOTTOM) / 2
    turn = f'transform="rotate(-90 14 {middle:.0f})"'
    parts.append(f'<text x="14" y="{middle:.0f}" text-anchor="middle" {turn}>{escape(chart.y_label)}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title, quote=True)}: '
        f'{escape(chart.y_label, quote=True)} over {escape(chart.x_label, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def scatter_legend(chart: Scatter) -> str:
    """The groups with their marks."""
    items = "".join(
        f'<li><svg viewBox="0 0 16 16" aria-hidden="true">{_shape(group, 8, 8)}</svg>{escape(name)}</li>'
        for group, name in enumerate(chart.groups)
        if any(one.group == group for one in chart.points)
    )
    return f'<ul class="legend marks">{items}</ul>'


def frontier(points: Sequence[Point], lower_is_better: bool) -> list[Point]:
    """The points that no other beats in both, by x."""
    best: list[Point] = []
    sign = -1.0 if lower_is_better else 1.0
    for one in sorted(points, key=lambda p: (p.x, -sign * p.y)):
        if not best or sign * one.y > sign * best[-1].y:
            best.append(one)
    return best


def _y_range(chart: Scatter) -> tuple[float, float]:
    ys = [one.y for one in chart.points] or [1.0]
    if chart.log_y:
        return min(ys) * 0.6, max(ys) * 1.6
    return 0.0, max(1.0, *ys) * 1.05


def _grid_x(low: float, high: float) -> str:
    parts = []
    for tick in log_ticks(low, high):
        x = _LEFT + log10(tick / low) / log10(high / low) * (WIDTH - _LEFT - _RIGHT)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            + _text(x, HEIGHT - _BOTTOM + 17, f"{tick:g} %", "middle")
        )
    return "".join(parts)


def _grid_y(chart: Scatter, bottom: float, top: float) -> str:
    ticks = log_ticks(bottom, top) if chart.log_y else [0.0, 0.25, 0.5, 0.75, 1.0]
    parts = []
    for tick in ticks:
        share = (
            log10(tick / bottom) / log10(top / bottom) if chart.log_y else (tick - bottom) / (top - bottom)
        )
        y = HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)
        shown = f"{tick:g}" if chart.log_y else f"{tick:.0%}"
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            + _text(_LEFT - 6, y + 4, shown, "end")
        )
    return "".join(parts)


def _mark(point: Point, x: float, y: float) -> str:
    told = escape(f"{point.label}: {point.told}")
    return f"<g>{_shape(point.group, x, y)}<title>{told}</title></g>"


def _shape(group: int, x: float, y: float) -> str:
    color = PALETTE[group % len(PALETTE)]
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>',
        f'<path d="M{x - 5:.1f} {y - 5:.1f}h10v10h-10z" fill="{color}"/>',
        f'<path d="M{x:.1f} {y - 6.5:.1f}l6 11h-12z" fill="{color}"/>',
        f'<path d="M{x:.1f} {y - 6.5:.1f}l6.5 6.5l-6.5 6.5l-6.5 -6.5z" fill="{color}"/>',
    )
    return shapes[group % len(shapes)]


def _labels(points: Sequence[Point], places: Sequence[tuple[float, float]]) -> list[str]:
    """Labels beside their points, moved where they would cover one another or a mark, with a line then."""
    order = sorted(range(len(points)), key=lambda i: places[i][1])
    taken = [(x - _MARK, x + _MARK, y + 4) for x, y in places]  # left, right, y
    parts = []
    for i in order:
        x, y = places[i]
        left, right = x + 9, x + 9 + 7.2 * len(points[i].label)
        wanted = y + 4
        clashes = [at for begin, end, at in taken if begin < right and left < end]
        while any(abs(wanted - at) < _CLASH for at in clashes):
            wanted = max(at for at in clashes if abs(wanted - at) < _CLASH) + _LABEL_HEIGHT
        taken.append((left, right, wanted))
        if abs(wanted - y - 4) > _LABEL_HEIGHT / 2:
            parts.append(
                f'<line class="grid" x1="{x + 5:.1f}" y1="{y:.1f}" x2="{left:.1f}" y2="{wanted - 4:.1f}"/>'
            )
        label = _text(left + 1, wanted, points[i].label, "start")
        parts.append(label.replace("<text", '<text class="label"', 1))
    return parts


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
