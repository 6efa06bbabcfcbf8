"""What a plot shows: series, axes and units, as plain data. Taking figures into them is the reports' job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Okabe and Ito's palette: told apart with any kind of colour vision, on light and dark ground.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "1 2")
CDF_POINTS = 120


@dataclass(frozen=True, slots=True)
class Series:
    """A named line; `dash` is an SVG dash pattern, so that colour is not the only difference."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    color: str
    dash: str = ""


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a logarithmic x axis; `y` is a share from 0 to `y_max`."""

    key: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    y_max: float
    note: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """Shares per category."""

    key: str
    title: str
    x_label: str
    y_label: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    note: str


Chart = LineChart | BarChart


def line_style(number: int) -> tuple[str, str]:
    """Colour and dash of the line `number`."""
    return PALETTE[number % len(PALETTE)], DASHES[number % len(DASHES)]


def log_ticks(low: float, high: float) -> Sequence[float]:
    """Powers of ten, with 2 and 5 between them where the range is short."""
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    steps = (1, 2, 5) if last - first <= 2 else (1, 3) if last - first <= 3 else (1,)
    ticks = [10.0**power * step for power in range(first, last + 1) for step in steps]
    # Rounding must not lose the tick at an end of the axis.
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def cumulative(name: str, seconds: Sequence[float], number: int) -> Series:
    """The share of `seconds` that is at most x, as line `number`; they must not be empty."""
    shares = np.linspace(0.005, 1.0, CDF_POINTS)
    return Series(
        name,
        tuple(float(x) for x in np.maximum(np.quantile(np.sort(seconds), shares), 1e-4)),
        tuple(float(x) for x in shares),
        *line_style(number),
    )
