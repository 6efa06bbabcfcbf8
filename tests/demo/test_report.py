"""The report: one file that loads nothing and into which no name or answer can write markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from tests.demo.conftest import HOSTILE

from tiercel.demo.outcome import Outcome
from tiercel.demo.report import report_html, write_report
from tiercel.demo.timeline import timeline_svg
from tiercel.errors import ConfigError

VOID = {"meta", "rect", "line", "br"}


class Tags(HTMLParser):
    """Collects the tags of a page and checks that they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.loads: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [
            str(value) for name, value in attrs if name in ("src", "href", "srcset", "data", "xlink:href")
        ]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def finished(self) -> bool:
        return not self._open


def tags_of(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.finished()
    return tags


def test_a_name_cannot_write_markup(outcome: Outcome) -> None:
    page = report_html(outcome)
    assert "<script" not in page.lower()
    assert "script" not in tags_of(page).seen
    assert page.count("&lt;script&gt;alert(1)") >= 5, "the name must be shown in lanes, bars, table and notes"
    assert "That &lt;b&gt;is&lt;/b&gt; it &amp; more" in page


def test_the_page_loads_nothing(outcome: Outcome) -> None:
    page = report_html(outcome)
    assert tags_of(page).loads == []
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert "default-src 'none'" in page


def test_problems_come_first(outcome: Outcome) -> None:
    bad = msgspec.structs.replace(outcome, problems=("The second process failed.",))
    page = report_html(bad)
    assert 0 < page.index("The second process failed.") < page.index("What happened when")


def test_the_timeline_shows_every_lane_span_and_the_restart(outcome: Outcome) -> None:
    svg = timeline_svg(outcome)
    for span in outcome.spans:
        assert span.title.replace(HOSTILE, "&lt;script&gt;alert(1)&lt;/script&gt;") in svg
    assert "restart: new process" in svg
    assert svg.count('class="name"') == 2


def test_a_very_short_span_can_still_be_seen(outcome: Outcome) -> None:
    svg = timeline_svg(outcome)
    widths = [float(width) for width in re.findall(r'<rect class="(?:ram|disk)"[^>]* width="([\d.]+)"', svg)]
    assert len(widths) == 3
    assert min(widths) >= 3.0


def test_words_of_turns_close_together_do_not_lie_on_each_other(outcome: Outcome) -> None:
    # A long wait before everything pushes the turns of a lane together at the right edge.
    late = tuple(
        msgspec.structs.replace(span, start_s=span.start_s + 5000, end_s=span.end_s + 5000)
        for span in outcome.spans
    )
    svg = timeline_svg(msgspec.structs.replace(outcome, spans=late))
    flags = re.findall(r'class="flag" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]+)<', svg)
    boxes = [
        (float(x) - (6.8 * len(text) if anchor == "end" else 0), float(y), 6.8 * len(text))
        for x, y, anchor, text in flags
    ]
    pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i]]
    assert any(abs(a[1] - b[1]) < 30 and abs(a[0] - b[0]) < 60 for a, b in pairs), "none came close"
    for a, b in pairs:
        assert abs(a[1] - b[1]) >= 12 or a[0] >= b[0] + b[2] or b[0] >= a[0] + a[2]


def test_nothing_ran_gives_a_page_without_figures(outcome: Outcome) -> None:
    empty = msgspec.structs.replace(outcome, turns=(), spans=(), gaps=(), problems=("It failed.",))
    page = report_html(empty)
    assert "nothing to compare" in page
    assert "<svg" not in page
    tags_of(page)


def test_a_file_that_cannot_be_written_is_one_line(outcome: Outcome, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--html: .*cannot be written"):
        write_report(tmp_path, outcome)
