"""A report and a comparison in words and cells, and as tables on a terminal. It decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiercel.bench.compare import Comparison
from tiercel.bench.numbers import Ratio, Spread
from tiercel.bench.results import (
    METRICS,
    OFF,
    ON,
    THROUGHPUT,
    Report,
    Summary,
    WorkloadRun,
    agreement,
    ratios,
    summary,
)
from tiercel.config import human_bytes
from tiercel.report.console import one_line

NOTHING = "–"
PERCENTILES_NOTE = "Percentiles are p50 / p90 / p99; – is not known, or of too few requests."


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: what it is, a cell per side, and how the sides compare."""

    label: str
    cells: tuple[str, ...]
    against: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """A workload's figures, a row each, and what they come to: sentences, empty with one side only."""

    rows: tuple[Row, ...]
    sentences: tuple[str, ...]


def tell(run: WorkloadRun, token_bytes: int | None = None) -> Told:
    """One workload in words; `token_bytes` is what a token's KV weighs, where that is known."""
    if not {ON, OFF} <= set(run.sides):
        return Told(tuple(_rows(run, {}, token_bytes)), ())
    compared = ratios(run.sides[OFF], run.sides[ON])
    return Told(tuple(_rows(run, compared, token_bytes)), (_verdict(compared), _answers(run)))


def _rows(run: WorkloadRun, compared: dict[str, Ratio], token_bytes: int | None) -> list[Row]:
    """Rows of which no side knows anything are left out."""
    sides = [summary(run.spec, side) for side in run.sides.values()]
    rows = [Row("answered", tuple(_answered(one) for one in sides))]

    def against(name: str) -> tuple[str, str]:
        ratio = compared.get(name)
        return ("", "") if ratio is None else (ratio_text(ratio), ratio.verdict)

    kinds = {sample.again for side in run.sides.values() for sample in side.samples}
    for name, (label, _, again) in METRICS.items():
        if again is not None and len(kinds) == 1:
            continue  # all of one kind: their TTFT is above already
        cells = spreads_text([getattr(one, f"{name}_s") for one in sides])
        rows.append(Row(label, cells, *against(name)))
    rows += [
        Row("requests a second", tuple(_rate(one.requests_per_s) for one in sides), *against(THROUGHPUT)),
        Row("answer tokens a second", tuple(_rate(one.tokens_per_s) for one in sides)),
        Row("prompt tokens, median and most", tuple(_lengths(one.prompt_tokens) for one in sides)),
        Row("prompt tokens reused", tuple(_share(one.cached_share) for one in sides)),
        Row("… from where", tuple(_places(one) for one in sides)),
        Row("… copied to the engine", tuple(_copied(one, token_bytes) for one in sides)),
        Row("read from tiers", tuple(_moved(one, read=True) for one in sides)),
        Row("written to tiers", tuple(_moved(one, read=False) for one in sides)),
        Row("prefill saved", tuple(_saved(one) for one in sides)),
        Row("peak memory", tuple(_bytes(one.host_bytes) for one in sides)),
        Row("peak GPU memory", tuple(_bytes(one.gpu_bytes) for one in sides)),
    ]
    if run.spec.rate:
        rows.append(Row("sent late", spreads_text([one.late_s for one in sides])))
    return [row for row in rows if any(cell != NOTHING for cell in row.cells)]


def _verdict(compared: dict[str, Ratio]) -> str:
    """What a workload comes to."""
    parts = [
        f"{words}: {ratio_text(compared[name])}"
        for name, words in (
            ("ttft_again", "the first token of prompts seen before"),
            ("ttft_new", "of new ones"),
            ("e2e", "whole answers"),
        )
        if name in compared
    ]
    return f"With offloading, {'; '.join(parts)}." if parts else "Nothing to compare."


def _answers(run: WorkloadRun) -> str:
    """How many answers are the same on both sides."""
    found = agreement(run.sides[ON], run.sides[OFF])
    text = f"Same answers with and without: {found.same} of {found.same + found.different}"
    if found.parted:
        text += f"; {found.parted} more had other prompts, because an answer before them differed"
    return text + "."


def ratio_text(ratio: Ratio) -> str:
    """A ratio with its interval; both turned over where the other side is slower, to be above 1."""
    if ratio.verdict == "slower":
        value, edges, word = 1 / ratio.ratio, (1 / (ratio.high or 1), 1 / (ratio.low or 1)), "slower"
    else:
        value, edges, word = ratio.ratio, (ratio.low or 0, ratio.high or 0), ratio.verdict
    if ratio.low is None:
        return f"{_factor(value)} (too few rounds to tell)"
    shown = f"{_factor(edges[0])[:-1]}–{_factor(edges[1])}"
    if word in ("faster", "slower"):
        return f"{_factor(value)} {word} ({shown})"
    return f"{'no difference' if word == 'same' else 'not told apart'} ({shown})"


def _factor(value: float) -> str:
    return f"{value:.0f}×" if value >= 20 else f"{value:.1f}×" if value >= 2 else f"{value:.2f}×"


def spreads_text(spreads: Sequence[Spread]) -> tuple[str, ...]:
    """Median, 90th and 99th percentile of each, in one unit; a dash for those that too few values tell."""
    medians = [one.p50 for one in spreads if one.p50 is not None]
    scale, unit = (1.0, "s") if max(medians, default=0.0) >= 1 else (1000.0, "ms")

    def shown(one: Spread) -> str:
        if one.p50 is None:
            return NOTHING
        parts = (NOTHING if x is None else _figure(x * scale) for x in (one.p50, one.p90, one.p99))
        return f"{' / '.join(parts)} {unit}"

    return tuple(shown(one) for one in spreads)


def seconds_text(seconds: float) -> str:
    """One time in a fitting unit."""
    return f"{_figure(seconds)} s" if seconds >= 1 or not seconds else f"{_figure(seconds * 1000)} ms"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or not value else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _answered(one: Summary) -> str:
    text = f"{one.answered}"
    wrong = [f"{count} {fault}" for fault, count in sorted(one.faults.items())]
    wrong += [f"{one.cut} cut off"] if one.cut else []
    wrong += [f"{one.unsent} not sent"] if one.unsent else []
    return f"{text} ({', '.join(wrong)})" if wrong else text


def _rate(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"


def _lengths(spread: Spread) -> str:
    return NOTHING if spread.p50 is None or spread.max is None else f"{spread.p50:,.0f}, {spread.max:,.0f}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _places(one: Summary) -> str:
    if one.figures is None or not one.figures.prompt_tokens:
        return NOTHING
    parts = [
        f"{name} {tokens / one.figures.prompt_tokens:.0%}"
        for name, tokens in one.figures.reused_tokens.items()
        if tokens
    ]
    return ", ".join(parts) or "nothing reused"


def _copied(one: Summary, token_bytes: int | None) -> str:
    """KV that came from the store, in bytes: tokens times what a token weighs."""
    if one.figures is None or token_bytes is None or not one.figures.prompt_tokens:
        return NOTHING
    tokens = sum(count for place, count in one.figures.reused_tokens.items() if place != "engine")
    return human_bytes(int(tokens * token_bytes))


def _saved(one: Summary) -> str:
    if one.figures is None or not (one.figures.saved_s or one.figures.spent_s):
        return NOTHING
    return f"{seconds_text(one.figures.saved_s)} for {seconds_text(one.figures.spent_s)} of waiting"


def _moved(one: Summary, *, read: bool) -> str:
    if one.figures is None:
        return NOTHING
    moved = one.figures.read_bytes if read else one.figures.written_bytes
    return ", ".join(f"{name} {human_bytes(int(count))}" for name, count in moved.items()) or NOTHING


def _bytes(value: int | None) -> str:
    return NOTHING if value is None else human_bytes(value)


def token_bytes_of(report: Report) -> int | None:
    """What a token's KV weighs, where it is known."""
    return next((side.token_bytes for side in report.sides if side.token_bytes is not None), None)


SIDES = {ON: "with offloading", OFF: "without"}


def show(report: Report, console: Console) -> None:
    """Print a report."""
    for run in report.workloads:
        console.print()
        told = tell(run, token_bytes_of(report))
        console.print(_table(run, told))
        for line in told.sentences:
            console.print(Text(line, style="bold"), soft_wrap=True)
        for name, side in run.sides.items():
            for fault, said in side.said.items():
                console.print(Text(one_line(f"{name}: {fault}: {said}")), soft_wrap=True)
    console.print()
    console.print(Text(PERCENTILES_NOTE), soft_wrap=True)
    for note in report.notes:
        console.print(Text(one_line(f"Note: {note}.")), soft_wrap=True)
    if report.interrupted:
        console.print(Text("Interrupted: these are the figures until then.", style="bold red"))
    for problem in report.problems:
        console.print(Text(one_line(f"Not as it should be: {problem}"), style="bold red"), soft_wrap=True)


def _table(run: WorkloadRun, told: Told) -> Table:
    table = Table(
        title=f"{run.spec.workload}: {run.spec.described()}", title_justify="left", header_style="bold"
    )
    table.add_column("")
    for name in run.sides:
        table.add_column(SIDES[name] if len(run.sides) > 1 else "", justify="right", overflow="fold")
    if len(run.sides) > 1:
        table.add_column("with against without", overflow="fold")
    for row in told.rows:
        cells = [Text(row.label), *(Text(one_line(cell)) for cell in row.cells)]
        if len(run.sides) > 1:
            style = {"faster": "green", "slower": "bold red"}.get(row.verdict, "")
            cells.append(Text(row.against, style=style))
        table.add_row(*cells)
    return table


def show_comparison(found: Comparison, console: Console) -> None:
    """Print a comparison of two reports."""
    console.print(Text(one_line(f"A: {found.first}")), soft_wrap=True)
    console.print(Text(one_line(f"B: {found.second}")), soft_wrap=True)
    for part in found.parts:
        table = Table(
            title=f"{part.workload}, {SIDES[part.side]}: B against A",
            title_justify="left",
            header_style="bold",
        )
        for head in ("", "A (median)", "B (median)", "B is", "must exceed"):
            table.add_column(head, justify="left" if head in ("", "B is") else "right")
        for name, ratio in part.ratios.items():
            style = {"faster": "green", "slower": "bold red"}.get(ratio.verdict, "")
            table.add_row(
                "seconds per answer" if name == THROUGHPUT else METRICS[name][0],
                seconds_text(ratio.base),
                seconds_text(ratio.other),
                Text(ratio_text(ratio), style=style),
                f"{ratio.margin:.0%}",
            )
        console.print()
        console.print(table)
    console.print()
    for note in found.notes:
        console.print(Text(one_line(f"Note: {note}.")), soft_wrap=True)
