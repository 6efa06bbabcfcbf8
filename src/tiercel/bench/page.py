"""The report as one HTML file: figures, curves and how it was measured. It loads and runs nothing.

Every text from outside (a server's name, its refusals, the command) is escaped where it enters the page.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape
from pathlib import Path

from tiercel.bench.results import ON, Report, WorkloadRun, summary
from tiercel.bench.samples import answered
from tiercel.bench.spec import KINDS
from tiercel.bench.text import PERCENTILES_NOTE, SIDES, Told, tell, token_bytes_of
from tiercel.report import files
from tiercel.report.charts import DASHES, PALETTE, BarChart, Chart, LineChart, cumulative
from tiercel.report.page import how_section, page
from tiercel.report.style import STYLE
from tiercel.report.svg import chart_svg, legend_html

_OWN_STYLE = """
.verdict{font-weight:600;margin:.3rem 0}.problem{color:#b3261e;font-weight:600}
h2.workload{margin:26px 0 4px;font-size:1.25rem}
td.faster{color:#0d7a57;font-weight:600}td.slower{color:#b3261e;font-weight:600}
@media(prefers-color-scheme:dark){.problem,td.slower{color:#ff8a80}td.faster{color:#4fcf9f}}
"""


def write_page(path: Path, report: Report) -> None:
    """Write the page. Raises ConfigError when the file cannot be written."""
    files.write_page(path, page_html(report))


def page_html(report: Report) -> str:
    """Return the page's text."""
    workloads = "".join(_workload(run, token_bytes_of(report)) for run in report.workloads)
    problems = "".join(
        f'<p class="problem">Not as it should be: {escape(one)}</p>' for one in report.problems
    )
    if report.interrupted:
        problems += '<p class="problem">Interrupted: these are the figures until then.</p>'
    body = (
        "<h1>KV offloading, measured from the client</h1>"
        f'<p class="source">{escape(report.command)}</p>{problems}{workloads}'
        f"{how_section(how_measured(report))}"
    )
    return page(f"tiercel bench: {report.when}", STYLE + _OWN_STYLE, body)


def charts_of(run: WorkloadRun) -> list[Chart]:
    """One workload's charts; those without data are left out."""
    found: list[Chart | None] = [
        _curves(run, "ttft", "Time to first token", again=True),
        _curves(run, "e2e", "Whole answers", again=False),
        _places(run),
    ]
    return [one for one in found if one is not None]


def _curves(run: WorkloadRun, key: str, title: str, *, again: bool) -> LineChart | None:
    """The share of requests that had waited at most so long, per side; for `again`, new prompts apart."""
    groups: dict[tuple[str, bool], list[float]] = {}
    for side, played in run.sides.items():
        for one in answered(played.samples):
            value = one.ttft_s if key == "ttft" else one.e2e_s
            if value is not None:
                groups.setdefault((side, again and not one.again), []).append(value)
    if not groups:
        return None
    words = {True: ", new", False: ", seen before" if len({new for _, new in groups}) > 1 else ""}
    # A side has its colour, a kind of prompts its dash.
    series = tuple(
        replace(
            cumulative(SIDES[side] + words[new], values, 0),
            color=PALETTE[0 if side == ON else 1],
            dash=DASHES[1 if new else 0],
        )
        for (side, new), values in groups.items()
    )
    since = "the time it was meant to be sent" if run.spec.rate else "sending"
    return LineChart(
        key, title, "seconds", "requests answered by then", series, 1.0, f"Measured from {since}."
    )


def _places(run: WorkloadRun) -> BarChart | None:
    """Prompt tokens by where their KV came from, with offloading."""
    if ON not in run.sides:
        return None
    figures = summary(run.spec, run.sides[ON]).figures
    if figures is None or not figures.prompt_tokens:
        return None
    shares = {
        name: tokens / figures.prompt_tokens for name, tokens in figures.reused_tokens.items() if tokens
    }
    shares["computed"] = max(0.0, 1.0 - sum(shares.values()))
    return BarChart(
        "places", "Where the prompts' KV came from", "place", "share of prompt tokens",
        tuple(shares), tuple(shares.values()), "As the server counted, with offloading.",
    )  # fmt: skip


def _workload(run: WorkloadRun, token_bytes: int | None) -> str:
    cards = "".join(
        f"<section><h2>{escape(chart.title)}</h2>{chart_svg(chart)}{legend_html(chart)}"
        f'<p class="note">{escape(chart.note)}</p></section>'
        for chart in charts_of(run)
    )
    told = tell(run, token_bytes)
    lines = "".join(f'<p class="verdict">{escape(line)}</p>' for line in told.sentences)
    said = "".join(
        f'<p class="note">{escape(name)}: {escape(fault)}: {escape(words)}</p>'
        for name, side in run.sides.items()
        for fault, words in side.said.items()
    )
    return (
        f'<h2 class="workload">{escape(run.spec.workload)}</h2>'
        f'<p class="source">{escape(KINDS[run.spec.workload].words)}: {escape(run.spec.described())}</p>'
        f'{lines}{said}<div class="cards">{cards}</div>{_table(run, told)}'
    )


def _table(run: WorkloadRun, told: Told) -> str:
    both = len(run.sides) > 1
    heads = [
        "",
        *(SIDES[name] if both else "" for name in run.sides),
        *(["with against without"] if both else []),
    ]
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(
        f"<tr><td>{escape(row.label)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells)}"
        + (f'<td class="{row.verdict}">{escape(row.against)}</td>' if both else "")
        + "</tr>"
        for row in told.rows
    )
    return (
        '<section class="wide"><div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="note">{PERCENTILES_NOTE}</p></section>'
    )


def how_measured(report: Report) -> list[tuple[str, str]]:
    """How it was measured, as names and words."""
    first = report.workloads[0].spec if report.workloads else None
    lines = [("when", report.when), *report.facts]
    lines += [(f"side '{SIDES[side.name]}'", f"{side.what}; model {side.model}") for side in report.sides]
    if first is not None:
        late = (
            "from when it was meant to be sent, so that a stall is charged to all who waited"
            if first.rate
            else ("from sending; the next one is sent when one is answered")
        )
        lines += [
            ("seed", f"{first.seed}; prompts of this run begin with {report.run}"),
            ("answers", f"greedy (temperature 0), {first.answer_tokens} tokens at most, streamed"),
            ("latency", late),
            ("order", f"{first.rounds} rounds; the side that goes first alternates; one side runs at a time"),
            ("left out", f"{first.warmup} warm-up requests after each start of a server"),
            ("deadline", f"{first.deadline_s:g} s a request"),
        ]
    lines += [
        (
            "difference",
            "mean over rounds of the ratio of medians, in brackets its 95 % interval; below 3 % is none",
        ),
        ("texts", f"{len(report.texts)} documents, cut at {report.chars_per_token:.2f} characters a token"),
    ]
    return lines + [("note", note) for note in report.notes]
