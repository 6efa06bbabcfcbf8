"""The report's charts as one PNG, by matplotlib, which is imported only here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiercel.errors import ConfigError
from tiercel.plan.simulate.charts import charts
from tiercel.report.charts import PALETTE, BarChart, Chart, LineChart, log_ticks

DPI = 130
_MATPLOTLIB_DASHES = {
    "": "-",
    "7 4": "--",
    "2 3": ":",
    "9 3 2 3": "-.",
    "4 2": (0, (4, 2)),
    "1 2": (0, (1, 2)),
}


def write_png(
    path: Path, data: Mapping[str, Any], ttft_s: Mapping[str, Any], *, only: str | None = None
) -> None:
    """Draw all charts, or the one with key `only`. Raises ConfigError if it cannot."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--png needs matplotlib, which is not installed: pip install matplotlib, or use --html"
        ) from None
    drawn = [chart for chart in charts(data, ttft_s) if only in (None, chart.key)]
    if not drawn:
        raise ConfigError("--png: there is nothing to draw; accepted: a trace with requests")
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(7.2 * columns, 4.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, chart in enumerate(drawn, start=1):
        _draw(figure.add_subplot(rows, columns, number), chart)
    try:
        figure.savefig(path, dpi=DPI, format="png")
    except OSError as error:
        raise ConfigError(f"--png: '{path}' cannot be written: {error.strerror or error}") from None


def _draw(axes: Any, chart: Chart) -> None:
    axes.set_title(chart.title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    if isinstance(chart, LineChart):
        _draw_lines(axes, chart)
    else:
        _draw_bars(axes, chart)


def _draw_lines(axes: Any, chart: LineChart) -> None:
    for series in chart.series:
        marker = "o" if len(series.x) <= 30 else None
        axes.plot(
            series.x, series.y, label=series.name, color=series.color, marker=marker, markersize=3,
            linestyle=_MATPLOTLIB_DASHES[series.dash], linewidth=1.8,
        )  # fmt: skip
    positive = [x for series in chart.series for x in series.x if x > 0]
    axes.set_xscale("log")
    axes.set_ylim(0, chart.y_max)
    ticks = log_ticks(min(positive), max(positive)) if positive else []
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_bars(axes: Any, chart: BarChart) -> None:
    bars = axes.barh(chart.labels, chart.values, color=PALETTE[0])
    share = chart.y_label.startswith("share")
    axes.bar_label(bars, [f"{v:.1%}" if share else f"{v:.3g}" for v in chart.values], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(chart.y_label)
    axes.set_ylabel(chart.x_label)
    if share:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
