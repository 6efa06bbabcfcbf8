"""Figures, intervals, verdicts and gates, from outcomes that are made up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.errors import ConfigError
from tiercel.eval.figures import interval, row_of
from tiercel.eval.judge import Outcome
from tiercel.eval.page import charts_of, page_html
from tiercel.eval.results import DROPS, EXACT, FORMAT, SKIPS, STORED, Report, Row, read_report, rows_of
from tiercel.eval.verdict import gates, label_of, verdicts
from tiercel.report.scatter import Point, Scatter, frontier, scatter_svg


def outcome(
    kl: float = 0.0, accuracy: float | None = 0.5, nll: float = 1.0, device: float = 100.0
) -> Outcome:
    return Outcome(
        kl=kl, agreement=1.0, accuracy=accuracy, score=None, nll=nll, tokens=20, answers=8, read_share=0.25,
        device_bytes=device, host_bytes=50.0, fetched_bytes=5.0, full_bytes=100.0, context_tokens=10,
        answer_s=0.1,
    )  # fmt: skip


def row(
    policy: str, kind: str, task: str, kl: float, accuracy: float | None, *, dense: bool = True,
    full: float | None = 0.5, budget: float = 0.25, device: float = 25.0,
) -> Row:  # fmt: skip
    return row_of(
        policy, kind, task, dense, budget, [outcome(kl, accuracy, 1 + kl, device)] * 2,
        [outcome(0, full)] * 2, [0.5] * 2,
    )  # fmt: skip


def report(rows: list[Row], failed: tuple[str, ...] = ()) -> Report:
    return Report(
        format=FORMAT, version="1", when="now", command="tiercel eval <b>", model="<m>", revision="abc",
        dtype="bfloat16", seeds=[1, 2], facts=[("processor", "a & b")], rows=rows, verdicts=verdicts(rows),
        failed=list(failed),
    )  # fmt: skip


ROWS = [
    row("full", EXACT, "kv-list", 0, 0.5, budget=1.0, device=100),
    row("full", EXACT, "needle", 0, 1.0, dense=False, full=1.0, budget=1.0, device=100),
    row("window", DROPS, "kv-list", 1.2, 0.1),
    row("window", DROPS, "needle", 0.9, 1.0, dense=False, full=1.0),
    row("landmark", SKIPS, "kv-list", 0.006, 0.5),
    row("landmark", SKIPS, "needle", 0.006, 1.0, dense=False, full=1.0),
    row("int8", STORED, "kv-list", 0.001, 0.49, budget=1.0, device=100),
]


def test_an_interval_is_students() -> None:
    assert interval([3.0]) == (None, None)
    low, high = interval([1.0, 2.0, 3.0])
    assert low == pytest.approx(2 - 4.303 / 3**0.5, abs=1e-3)
    assert high == pytest.approx(2 + 4.303 / 3**0.5, abs=1e-3)


def test_differences_are_taken_text_by_text() -> None:
    full = [outcome(accuracy=0.9, nll=2.0), outcome(accuracy=0.3, nll=1.0)]
    mine = [outcome(0.1, 0.8, 2.5), outcome(0.3, 0.2, 1.5)]
    made = row_of("quest", SKIPS, "kv-list", True, 0.25, mine, full, [1.0, 3.0])
    assert (made.accuracy, made.accuracy_full) == pytest.approx((0.5, 0.6))
    assert made.accuracy_drop == pytest.approx(0.1)
    assert made.accuracy_drop_low == pytest.approx(0.1)  # both texts agree, however hard each is
    assert made.accuracy_drop_high == pytest.approx(0.1)
    assert made.nll_rise == pytest.approx(0.5)
    assert made.kl == pytest.approx(0.2)
    assert made.kl_low == 0.0
    assert (made.answers, made.tokens, made.seeds, made.prefill_s) == (16, 40, 2, 2.0)
    assert (made.device_share, made.stored_share, made.fetched_share) == (1.0, 0.5, 0.05)
    assert made.fetched_bytes_per_token == 0.5


def test_verdicts_in_words() -> None:
    said = verdicts(ROWS)
    assert said["full"] == "exact: the reference"
    assert said["window @0.25"] == (
        "safe for needle-type use only: loses 80% of facts where many are asked (80% on kv-list), "
        "finds the needle; what it drops is gone"
    )
    assert said["landmark @0.25"] == "safe on these tasks: loses no facts, finds the needle"
    assert said["int8"].startswith("as good as exact on these tasks (KL 0.0010 at most")


def test_a_task_that_full_attention_fails_says_nothing_about_losses() -> None:
    said = verdicts([row("h2o", DROPS, "text2json", 0.5, 0.0, full=0.1)])
    assert said == {"h2o @0.25": "KL 0.500: full attention is right too rarely here to say what is lost"}


def test_gates() -> None:
    assert gates(ROWS, None, None) == []
    assert gates(ROWS, 2.0, 0.5) == []
    assert gates(ROWS, 0.01, None) == [
        "window @0.25 on kv-list: KL 1.2000 is above 0.01",
        "window @0.25 on needle: KL 0.9000 is above 0.01",
    ]
    assert gates(ROWS, None, 0.4) == [
        "window @0.25 on kv-list: accuracy falls by 0.400 to 0.100, which is not below 0.4"
    ]
    assert len(gates(ROWS, None, 0.0)) == 2  # any drop at all: int8's too
    assert len(gates(ROWS, None, float("nan"))) == 2, "a limit that is none lets nothing through"
    nan = row("x", DROPS, "t", float("nan"), 0.5)
    assert gates([nan], 1.0, None), "a figure that is none passes no gate"


def test_reports_come_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(report(ROWS).to_json())
    back = read_report(path)
    assert back == report(ROWS)
    assert [one.task for one in rows_of(back, "window", 0.25)] == ["kv-list", "needle"]
    assert rows_of(back, "window", 0.5) == []
    plain = msgspec.json.decode(path.read_bytes())
    assert (plain["model"], plain["revision"], plain["rows"][6]["policy"]) == ("<m>", "abc", "int8")


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_report_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="is no report"):
        read_report(path)


def test_the_page_holds_everything_and_runs_nothing() -> None:
    page = page_html(report(ROWS, ("window @0.25 on kv-list: KL",)))
    for text in (
        "&lt;m&gt;",
        "tiercel eval &lt;b&gt;",
        "a &amp; b",
        "loses 80% of facts",
        "Gates that do not",
    ):
        assert text in page
    assert "<script" not in page
    assert page.count('<svg viewBox="0 0 760') == 2


def test_the_frontier_is_what_nothing_beats() -> None:
    points = [Point(name, x, y, 0, "") for name, x, y in (("a", 10, 0.2), ("b", 20, 0.1), ("c", 30, 0.9))]
    assert [one.label for one in frontier(points, lower_is_better=False)] == ["a", "c"]
    assert [one.label for one in frontier(points, lower_is_better=True)] == ["a", "b"]


def test_charts_of_few_or_equal_points_are_drawn() -> None:
    assert charts_of([]) == []
    point = Point("<a>", 100, 0.0, 0, "")
    for points in ((), (point,), (point, point)):
        assert "NaN" not in scatter_svg(Scatter("t", "x", "y", points, ("g",)))
    assert "&lt;a&gt;" in scatter_svg(Scatter("t", "x", "y", (point,), ("g",)))


def test_what_does_nothing_has_no_place_on_the_axis() -> None:
    """A codec where every layer has a window of the model's own: no policy decided anything."""
    nothing = msgspec.structs.replace(row("int8", STORED, "kv-list", 0, 0.5, budget=1.0), acts=False)
    page = page_html(report([*ROWS, msgspec.structs.replace(nothing, policy="int4")]))
    assert page.count('class="label"') == page_html(report(ROWS)).count('class="label"')
    assert ">int4<" in page, "the table has it"


def test_labels_of_points_at_one_place_do_not_cover_each_other() -> None:
    import re

    points = tuple(Point(name, 25, 0.5, 0, "") for name in "abcd")
    svg = scatter_svg(Scatter("t", "x", "y", points, ("g",)))
    heights = [float(y) for y in re.findall(r'<text class="label" x="[\d.]+" y="([\d.]+)"', svg)]
    assert len(heights) == 4
    assert min(b - a for a, b in zip(sorted(heights), sorted(heights)[1:], strict=False)) >= 15


@given(y=st.floats(0, 1), count=st.integers(2, 40))
def test_however_many_labels_there_are_and_wherever_all_find_a_place(y: float, count: int) -> None:
    """Distances that rounding makes a little shorter than a label's height once moved one for ever."""
    points = tuple(Point(f"p{number}", 25, y + number / 1000, 0, "") for number in range(count))
    assert scatter_svg(Scatter("t", "x", "y", points, ("g",))).count('class="label"') == count


def test_labels_name_the_budget_where_there_is_one() -> None:
    assert label_of(ROWS[0]) == "full"
    assert label_of(ROWS[2]) == "window @0.25"
    assert label_of(row("quest", SKIPS, "t", 0, 0, budget=0.0625)) == "quest @0.0625"
