"""Charts as inline SVG, sized so that the text is still readable on a phone. No scripts, no other files."""

from __future__ import annotations

from html import escape
from math import log10

from tiercel.report.charts import PALETTE, BarChart, Chart, LineChart, Series, log_ticks

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 46
BAR_LABEL_WIDTH = 150
BAR_HEIGHT = 22


def chart_svg(chart: Chart) -> str:
    """Return an `<svg>` element that fills the width it is given."""
    return _lines(chart) if isinstance(chart, LineChart) else _bars(chart)


def legend_html(chart: Chart) -> str:
    """Return the legend of a line chart, empty for one that needs none."""
    if not isinstance(chart, LineChart):
        return ""
    items = "".join(
        f'<li><svg viewBox="0 0 28 8" aria-hidden="true"><line x1="0" y1="4" x2="28" y2="4" '
        f'stroke="{s.color}" stroke-width="3" stroke-dasharray="{s.dash}"/></svg>{escape(s.name)}</li>'
        for s in chart.series
    )
    return f'<ul class="legend">{items}</ul>'


def _lines(chart: LineChart) -> str:
    xs = [x for series in chart.series for x in series.x if x > 0]
    low, high = (min(xs), max(xs)) if xs else (1.0, 10.0)
    if high <= low:
        low, high = low / 2, high * 2
    parts = [_y_axis(chart.y_max), _x_ticks(low, high)]
    parts += [_line(series, low, high, chart.y_max) for series in chart.series]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, chart.x_label, "middle"))
    parts.append(_upright(chart.y_label))
    return _svg(chart, HEIGHT, "".join(parts))


def _svg(chart: Chart, height: float, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(chart.title, quote=True)}: '
        f'{escape(chart.y_label, quote=True)} over {escape(chart.x_label, quote=True)}">{body}</svg>'
    )


def _x(value: float, low: float, high: float) -> float:
    share = (log10(max(value, low)) - log10(low)) / (log10(high) - log10(low))
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _y_axis(top: float) -> str:
    parts = []
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:.0%}", "end"))
    return "".join(parts)


def _x_ticks(low: float, high: float) -> str:
    parts = []
    for tick in log_ticks(low, high):
        x = _x(tick, low, high)
        bottom = HEIGHT - BOTTOM
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"{tick:g}", "middle"))
    return "".join(parts)


def _line(series: Series, low: float, high: float, top: float) -> str:
    points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if x > 0]
    path = " ".join(f"{_x(x, low, high):.1f},{_y(min(y, top), top):.1f}" for x, y in points)
    line = (
        f'<polyline fill="none" stroke="{series.color}" stroke-width="2.2" stroke-linejoin="round" '
        f'stroke-dasharray="{series.dash}" points="{path}"><title>{escape(series.name)}</title></polyline>'
    )
    if len(points) > 30:
        return line
    dots = "".join(
        f'<circle cx="{_x(x, low, high):.1f}" cy="{_y(min(y, top), top):.1f}" r="2.6" fill="{series.color}">'
        f"<title>{escape(series.name)}: {y:.1%} at {x:.3g}</title></circle>"
        for x, y in points
    )
    return line + dots


def _bars(chart: BarChart) -> str:
    top = max(chart.values, default=0.0) or 1.0
    share = max(chart.values, default=0.0) <= 1 and chart.y_label.startswith("share")
    width = WIDTH - BAR_LABEL_WIDTH - 58
    parts = []
    for row, (label, value) in enumerate(zip(chart.labels, chart.values, strict=True)):
        y = TOP + row * BAR_HEIGHT
        length = max(value / top * width, 1.0)
        shown = f"{value:.1%}" if share else f"{value:.3g}"
        parts.append(_text(BAR_LABEL_WIDTH - 8, y + 14, label, "end"))
        parts.append(
            f'<rect x="{BAR_LABEL_WIDTH}" y="{y + 2}" width="{length:.1f}" height="{BAR_HEIGHT - 6}" rx="2" '
            f'fill="{PALETTE[0]}"/>'
        )
        parts.append(_text(BAR_LABEL_WIDTH + length + 6, y + 14, shown, "start"))
    height = TOP + len(chart.labels) * BAR_HEIGHT + 24
    parts.append(_text(BAR_LABEL_WIDTH, height - 6, f"{chart.y_label}, by {chart.x_label}", "start"))
    return _svg(chart, height, "".join(parts))


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _upright(content: str) -> str:
    y = TOP + (HEIGHT - TOP - BOTTOM) / 2
    turn = f'transform="rotate(-90 12 {y:.0f})"'
    return f'<text x="12" y="{y:.0f}" text-anchor="middle" {turn}>{escape(content)}</text>'
