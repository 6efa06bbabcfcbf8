"""The report: one HTML file with timeline, bars, table and how it was measured. It loads and runs nothing.

Every text from outside (names of documents, answers of the model) is escaped where it enters the page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from statistics import median

from tiercel.config import human_bytes
from tiercel.demo.console import moved_text, store_cost_text
from tiercel.demo.outcome import Outcome, Row, Turn
from tiercel.demo.style import STYLE
from tiercel.demo.timeline import LEGEND, SPAN_WIDTH_MIN, timeline_svg
from tiercel.report import files
from tiercel.report.page import page

# The longest bar's share of the width; its label needs the rest, also on a phone.
_BAR_SHARE = 0.5


def write_report(path: Path, outcome: Outcome) -> None:
    """Write the page. Raises ConfigError when the file cannot be written."""
    files.write_page(path, report_html(outcome))


def report_html(outcome: Outcome) -> str:
    """Return the page's text."""
    body = (
        f"{_head(outcome)}{_tiles(outcome)}{_timeline(outcome)}{_bars(outcome)}{_table(outcome)}"
        f"{_measured(outcome)}{_conversations(outcome)}"
    )
    return page("Tiercel demo: resumed conversations", STYLE, body)


def _head(outcome: Outcome) -> str:
    problems = "".join(
        f'<p class="problem">Not as it should be: {escape(one)}</p>' for one in outcome.problems
    )
    return (
        "<h1>Prefill once, resume anywhere</h1>"
        '<p class="lead">Each conversation is about a long document that the model has to read before it '
        "can answer. Tiercel keeps what was read (the KV cache) in RAM and on disk, so that a conversation "
        "that comes back goes on at once, even in a new process.</p>"
        f'{problems}<p class="verdict">{escape(outcome.summary())}</p>'
    )


def _tiles(outcome: Outcome) -> str:
    rows = outcome.rows
    tiles = []
    if rows:
        tiles.append(_tile("first token, recomputed", median(row.ttft_cold_s for row in rows), len(rows)))
    groups = (
        ("resumed from RAM", "ram", False),
        ("resumed from disk", "disk", False),
        ("from disk after the restart", "disk", True),
    )
    resumed = [turn for turn in outcome.turns if turn.row() is not None]
    for name, source, restarted in groups:
        found = [t.ttft_s for t in resumed if t.source == source and t.restarted == restarted]
        if found:
            tiles.append(_tile(name, median(found), len(found)))
    same = sum(row.same_answer for row in rows)
    tiles.append(f"<div><dt>same answers</dt><dd>{same} of {len(rows)}</dd></div>")
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _tile(name: str, seconds: float, count: int) -> str:
    of = f"median of {count}" if count > 1 else "one turn"
    return f"<div><dt>{name}</dt><dd>{_seconds(seconds)}<small>{of}</small></dd></div>"


def _timeline(outcome: Outcome) -> str:
    items = "".join(f'<li><i class="{kind}"></i>{escape(words)}</li>' for kind, words in LEGEND)
    return (
        f'<section><h2>What happened when</h2><div class="scroll" tabindex="0">{timeline_svg(outcome)}</div>'
        f'<ul class="legend">{items}<li><i class="restart"></i>restart: a new process starts</li></ul>'
        f'<p class="note">To scale, except that nothing is drawn narrower than {SPAN_WIDTH_MIN:g} pixels. '
        "Point at a bar for its figures.</p></section>"
    )


def _bars(outcome: Outcome) -> str:
    pairs = [(turn, row) for turn in outcome.turns if (row := turn.row()) is not None]
    if not pairs:
        return ""
    longest = max(max(row.ttft_cold_s, row.ttft_s) for _, row in pairs)
    items = "".join(
        f"<div><p>{escape(row.name)}</p>"
        f"{_bar([('prefill', row.ttft_cold_s)], longest, f'recomputed {_seconds(row.ttft_cold_s)}')}"
        f"{_bar(_parts(turn), longest, f'from {turn.source_text()} {_seconds(row.ttft_s)}')}</div>"
        for turn, row in pairs
    )
    return (
        "<section><h2>Time to first token: recomputed and resumed</h2>"
        f'<div class="bars">{items}</div><p class="note">A resumed turn restores whole blocks and computes '
        "what comes after the last of them: the rest of the last answer and the new question.</p></section>"
    )


def _parts(turn: Turn) -> list[tuple[str, float]]:
    if turn.source == "none":
        return [("prefill", turn.ttft_s)]
    return [(turn.source, turn.load_s), ("prefill", max(0.0, turn.ttft_s - turn.load_s))]


def _bar(parts: list[tuple[str, float]], longest_s: float, label: str) -> str:
    whole_s = sum(seconds for _, seconds in parts) or 1.0
    inner = "".join(f'<i class="{kind}" style="width:{s / whole_s:.2%}"></i>' for kind, s in parts)
    width = f"{whole_s / longest_s * _BAR_SHARE:.2%}"
    return (
        f'<div class="bar"><span class="fill" style="width:{width}">{inner}</span>'
        f"<span>{escape(label)}</span></div>"
    )


def _table(outcome: Outcome) -> str:
    head = (
        "conversation", "prompt tokens", "reused tokens", "from where", "TTFT cold", "TTFT resumed",
        "speed-up", "same answer", "from RAM", "from disk",
    )  # fmt: skip
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(_table_row(turn, row) for turn in outcome.turns if (row := turn.row()) is not None)
    lines = (store_cost_text(outcome), moved_text(outcome))
    return (
        f'<section><h2>Every resumed turn</h2><div class="scroll" tabindex="0"><table><thead><tr>{top}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
        f'<p class="note">{escape(" ".join(line for line in lines if line))} Bytes from RAM were copied '
        "to the model, bytes from disk were read on the way to it. A turn with blocks from several places "
        f"counts as from the slowest.</p>{_notes(outcome)}</section>"
    )


def _table_row(turn: Turn, row: Row) -> str:
    cells = (
        f"{row.prompt_tokens:,}", f"{row.reused_tokens:,}", turn.source_text(), _seconds(row.ttft_cold_s),
        _seconds(row.ttft_s), f"{row.speedup:.1f}×",
    )  # fmt: skip
    same = "yes" if row.same_answer else "no"
    return (
        f"<tr><td>{escape(row.name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}"
        f'<td class="{same}">{same}</td><td>{human_bytes(row.bytes_ram)}</td>'
        f"<td>{human_bytes(row.bytes_disk)}</td></tr>"
    )


def _notes(outcome: Outcome) -> str:
    return "".join(f'<p class="note">Note: {escape(note)}.</p>' for note in outcome.notes)


def _measured(outcome: Outcome) -> str:
    rows = "".join(f"<dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}</dd>" for fact in outcome.facts)
    return f'<section><h2>How it was measured</h2><dl class="facts">{rows}</dl></section>'


def _conversations(outcome: Outcome) -> str:
    parts = []
    for lane, name in enumerate(outcome.conversations):
        said = "".join(
            f"<p>{escape(turn.question)}</p><blockquote>{escape(turn.answer) or '(nothing)'}</blockquote>"
            for turn in outcome.turns
            if turn.lane == lane
        )
        parts.append(f"<details><summary>{escape(name)}</summary>{said}</details>")
    return (
        '<section><h2>What was said</h2><p class="note">The demo\'s model is very small; its answers are '
        "here because they are compared token by token, not because they are good. They are cut at "
        f"the longest answer asked for.</p>{''.join(parts)}</section>"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
