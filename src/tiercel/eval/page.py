"""The report as one HTML file: verdicts, quality over memory, the table, how it was measured. It loads and
runs nothing.

Every text from outside (model, task and file names, the command) is escaped where it enters the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from tiercel.config import human_bytes
from tiercel.eval.results import DROPS, EXACT, SKIPS, STORED, EndpointRow, Report, Row
from tiercel.eval.verdict import label_of, loss
from tiercel.report import files
from tiercel.report.page import how_section, page
from tiercel.report.scatter import Point, Scatter, scatter_legend, scatter_svg
from tiercel.report.style import STYLE

_OWN_STYLE = """
.problem{color:#b3261e;font-weight:600}
.frontier{stroke:var(--soft);stroke-width:1.4;stroke-dasharray:5 4}
ul.gates{margin:.2rem 0 1rem}
.label{paint-order:stroke;stroke:var(--card);stroke-width:4px}
.legend.marks svg{width:16px;height:16px}
table.verdicts td{white-space:normal;text-align:left;vertical-align:top}
table.verdicts td:first-child{white-space:nowrap;font-weight:600}
h2.task{margin:22px 0 4px}
@media(prefers-color-scheme:dark){.problem{color:#ff8a80}}
"""
GROUPS = (EXACT, DROPS, SKIPS, STORED)
_GROUP_WORDS = (
    "exact", "drops: what is not kept is gone", "skips: the rest is kept elsewhere", "stored by a codec"
)  # fmt: skip
# Zero has no place on a logarithmic axis.
_KL_MIN = 1e-4


def write_page(path: Path, report: Report) -> None:
    """Write the page. Raises ConfigError when the file cannot be written."""
    files.write_page(path, page_html(report))


def page_html(report: Report) -> str:
    """Return the page's text."""
    gates = "".join(f"<li>{escape(one)}</li>" for one in report.failed)
    failed = f'<p class="problem">Gates that do not hold:</p><ul class="gates">{gates}</ul>' if gates else ""
    cards = "".join(
        f'<section class="wide"><h2>{escape(chart.title)}</h2>{scatter_svg(chart)}{scatter_legend(chart)}'
        f'<p class="note">{escape(note)}</p></section>'
        for chart, note in charts_of(report.rows)
    )
    cards += _endpoints(report)
    tasks = "".join(_task(task, rows) for task, rows in _by_task(report.rows).items())
    verdicts = _verdicts(report) if report.verdicts else ""
    body = (
        f"<h1>What lossy KV does to the answers of {escape(report.model)}</h1>"
        f'<p class="source">{escape(report.command)}</p>{failed}'
        f"{verdicts}{cards}{tasks}{how_section(how_measured(report))}"
    )
    return page(f"tiercel eval: {report.model}", STYLE + _OWN_STYLE, body)


def charts_of(rows: Sequence[Row]) -> list[tuple[Scatter, str]]:
    """Quality over memory, each with its note; those without data are left out."""
    by: dict[str, list[Row]] = {}
    for row in rows:
        by.setdefault(label_of(row), []).append(row)
    kept, kls = [], []
    for label, mine in by.items():
        if not any(row.acts for row in mine):
            continue
        x = 100 * fmean(memory_share(row) for row in mine)
        group = GROUPS.index(mine[0].kind)
        dense = [row for row in mine if row.dense]
        if (lost := loss(dense)) is not None:
            kept.append(
                Point(label, x, 1 - lost, group, f"{1 - lost:.0%} of answers at {x:.3g} % of the bytes")
            )
        if dense and mine[0].kind != EXACT:
            kl = fmean(row.kl for row in dense)
            kls.append(Point(label, x, max(kl, _KL_MIN), group, f"KL {kl:.4f} at {x:.3g} % of the bytes"))
    x_label = "bytes of KV on the device (of a codec: stored), of those of full KV"
    found = []
    if kept:
        found.append((
            Scatter("Answers kept", x_label, "share of full attention's right answers", tuple(kept),
                    _GROUP_WORDS),
            "Mean over the tasks that need many facts and that full attention is good enough at to judge by; "
            "up and to the left is better. The dashed line joins what nothing else beats in both. Bytes by "
            "each policy's definition, with its landmarks and what it reads at a time.",
        ))  # fmt: skip
    if kls:
        found.append((
            Scatter("Distance from exact answers", x_label, "KL, nats a token", tuple(kls),
                    _GROUP_WORDS, True),
            "Mean over the tasks that need many facts; down and to the left is better. 0.003 is what two "
            "exact computations in bf16 differ by.",
        ))  # fmt: skip
    return found


def memory_share(row: Row) -> float:
    """What the policy makes small, as a share of full KV: device bytes, for a codec stored bytes."""
    return row.stored_share if row.kind == STORED else row.device_share


def _verdicts(report: Report) -> str:
    body = "".join(
        f"<tr><td>{escape(label)}</td><td>{escape(words)}</td></tr>"
        for label, words in report.verdicts.items()
    )
    return (
        '<section class="wide"><h2>In words</h2><div class="scroll" tabindex="0">'
        f'<table class="verdicts"><tbody>{body}</tbody></table></div>'
        '<p class="note">For this model, these texts and this length of context; other models and longer '
        "contexts differ.</p></section>"
    )


def _by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    by: dict[str, list[Row]] = {}
    for row in rows:
        by.setdefault(row.task, []).append(row)
    return by


COLUMNS = (
    "policy",
    "KL",
    "agreement",
    "right",
    "fewer right",
    "NLL",
    "read",
    "on device",
    "stored",
    "fetched",
)


SPEED_COLUMNS = ("TTFT", "TPOT", "device KV", "moved a token")


def columns_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """The columns of a task's table: with speed, where it was measured."""
    return (*COLUMNS, *SPEED_COLUMNS) if any(row.ttft_s is not None for row in rows) else COLUMNS


def cells_of(row: Row) -> tuple[str, ...]:
    """A row's cells, as `columns_of` names them, for the page and the terminal."""
    return (*_quality_cells(row), *_speed_cells(row))


def _speed_cells(row: Row) -> tuple[str, ...]:
    if row.ttft_s is None or row.tpot_s is None:
        return ()
    return (
        f"{row.ttft_s:.2f} s",
        f"{1000 * row.tpot_s:.0f} ms",
        human_bytes(row.device_bytes or 0),
        human_bytes(round(row.moved_bytes_per_token or 0)),
    )


def _quality_cells(row: Row) -> tuple[str, ...]:
    drop = "–"
    if row.accuracy_drop is not None and row.kind != EXACT:
        drop = _with_interval(row.accuracy_drop, row.accuracy_drop_low, row.accuracy_drop_high, 2)
    return (
        label_of(row),
        "0" if row.kind == EXACT else _with_interval(row.kl, row.kl_low, row.kl_high, 4),
        f"{row.agreement:.3f}",
        "–" if row.accuracy is None else f"{row.accuracy:.2f}",
        drop,
        f"{row.nll:.3f}",
        f"{row.read_share:.0%}",
        f"{row.device_share:.0%}",
        f"{row.stored_share:.0%}",
        f"{row.fetched_share:.0%}",
    )


def _with_interval(value: float, low: float | None, high: float | None, digits: int) -> str:
    shown = f"{value:.{digits}f}"
    return shown if low is None or high is None else f"{shown} [{low:.{digits}f}, {high:.{digits}f}]"


def _task(task: str, rows: Sequence[Row]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in columns_of(rows))
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells_of(row))}</tr>" for row in rows
    )
    first = rows[0]
    about = (
        f"{first.seeds} texts of about {first.context_tokens} tokens, {first.answers} answers of "
        f"{first.tokens} tokens in all. In brackets 95 % intervals over the texts."
    )
    return (
        f'<section class="wide"><h2>{escape(task)}</h2><div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="note">{escape(about)}</p></section>'
    )


ENDPOINT_COLUMNS = ("task", "right", "right at the baseline", "fewer right", "same answers", "answers")


def endpoint_cells(row: EndpointRow) -> tuple[str, ...]:
    """A row's cells, as `ENDPOINT_COLUMNS` names them."""
    drop = _with_interval(row.accuracy_drop, row.accuracy_drop_low, row.accuracy_drop_high, 2)
    return (row.task, f"{row.accuracy:.2f}", f"{row.accuracy_baseline:.2f}", drop, f"{row.same:.0%}",
            str(row.answers))  # fmt: skip


def _endpoints(report: Report) -> str:
    if not report.endpoints:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ENDPOINT_COLUMNS)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in endpoint_cells(row))}</tr>"
        for row in report.endpoints
    )
    return (
        '<section class="wide"><h2>Two servers</h2><div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


_SPEED = (
    "a greedy answer of 16 tokens to the first text, by the judge's attention in float32; TTFT: reading the "
    "text and deciding; TPOT: the median step; device KV: the most at a time, counted, new tokens included; "
    "moved: from host memory, per token"
)


def how_measured(report: Report) -> list[tuple[str, str]]:
    """How it was measured, as names and words."""
    about = [("when", report.when), *report.facts, ("seeds", ", ".join(map(str, report.seeds)))]
    if report.endpoints:
        return [
            *about,
            ("model", report.model),
            ("questions", "completions at temperature 0, each behind the right answers to those before it"),
            ("right", "what is written begins with the right answer"),
            ("intervals", "Student's t over texts; differences are of the same text"),
        ]
    speed = [("speed", _SPEED)] if any(row.ttft_s is not None for row in report.rows) else []
    return [
        ("model", f"{report.model}, weights {report.revision[:16]}, {report.dtype}"),
        *about,
        ("context", "read once with full attention; policies decide at its end, before the question"),
        ("answers", "teacher-forced: each token predicted from the right ones before it, all in one forward"),
        ("KL", "of full attention's distribution against the policy's, over the answers' tokens"),
        ("intervals", "Student's t over texts; differences to full attention are of the same text"),
        ("bytes", "by each policy's definition, of the context's KV; read: measured"),
        *speed,
    ]  # fmt: skip
