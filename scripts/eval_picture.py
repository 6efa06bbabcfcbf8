"""Picture of a judgement for the docs: `python -m scripts.eval_picture docs/benchmarks/eval.json`.

Draws quality over memory from a report of `tiercel eval --json`, as its page does, with a headless Chromium.
It judges nothing itself.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from scripts.demo_report import picture
from tiercel.eval.page import charts_of
from tiercel.eval.results import read_report
from tiercel.report.scatter import scatter_legend, scatter_svg
from tiercel.report.style import STYLE

TARGET = Path(__file__).parents[1] / "docs" / "images" / "eval-frontier.png"
_OWN_STYLE = (
    ".frontier{stroke:var(--soft);stroke-width:1.4;stroke-dasharray:5 4}"
    ".label{paint-order:stroke;stroke:var(--card);stroke-width:4px}.legend.marks svg{width:16px;height:16px}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, default=TARGET)
    arguments = parser.parse_args()
    chart, note = charts_of(read_report(arguments.report).rows)[-1]
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><style>{STYLE}{_OWN_STYLE}</style><body><main>'
        f'<section class="wide"><h2>{chart.title}</h2>{scatter_svg(chart)}{scatter_legend(chart)}'
        f'<p class="note">{note}</p></section></main></body></html>'
    )
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "chart.html"
        drawn.write_text(page)
        picture(drawn, arguments.out, 1000, 780)


if __name__ == "__main__":
    main()
