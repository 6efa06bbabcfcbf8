"""A whole run on two servers: order, warm-up, figures, answers, reports, and what a server may do to it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console
from scripts.browser import FLAGS, chromium
from tests.bench.fake import MODEL, FakeServer, Handler, good, prompt_tokens, serving
from tests.bench.test_workload import DOCUMENTS

pytest.importorskip("httpx")

from tiercel.bench.compare import compare_reports
from tiercel.bench.figures import Figures
from tiercel.bench.numbers import MARGIN
from tiercel.bench.page import page_html, write_page
from tiercel.bench.results import OFF, ON, Report, read_report, summary
from tiercel.bench.run import Server, Setup, run_bench
from tiercel.bench.sides import UrlSide
from tiercel.bench.spec import Asked
from tiercel.bench.stop import Stop
from tiercel.bench.text import show, show_comparison, tell
from tiercel.errors import ConfigError

SMALL = Asked(sessions=2, turns=2, tokens=50, answer_tokens=8, pause_s=0.0, rounds=4)


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def show(self, text: str) -> None:
        self.lines.append(text)


def remembers(handler: Handler, body: dict[str, Any]) -> None:
    """What was sent before is there again: fast, and counted."""
    server = handler.server
    before = [one["messages"] for one in server.bodies[:-1]]
    seen = any(body["messages"][: len(one)] == one for one in before)
    cached = prompt_tokens(before[-1:][0] and {"messages": body["messages"][:1]}) if seen else 0
    good(handler, body, cached=cached, wait_s=0.0 if seen else 0.03)


def forgets(handler: Handler, body: dict[str, Any]) -> None:
    good(handler, body, wait_s=0.03)


def run(
    servers: dict[str, FakeServer],
    asked: Asked = SMALL,
    workloads: Sequence[str] = ("chat",),
    stop: Stop | None = None,
) -> Report:
    sides = [UrlSide(name, server.url, server.url) for name, server in servers.items()]
    setup = Setup(documents=DOCUMENTS, model=None, api_key="key", run="abcd", command="tiercel bench …")
    return run_bench(
        [asked.spec(name) for name in workloads], sides, setup, Screen(), stop or Stop(), ["a note"]
    )


@pytest.fixture(scope="module")
def report() -> Report:
    with serving(remembers) as on, serving(forgets) as off:
        on.metrics = off.metrics = (
            'tiercel_reused_tokens_total{place="ram"} 5.0\ntiercel_prompt_tokens_total 9.0\n'
        )
        return run({ON: on, OFF: off}, workloads=("chat", "document", "unique"))


def printed(report: Report) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=200, highlight=False))
    return out.getvalue()


def test_sides_take_turns_and_get_the_same_prompts(report: Report) -> None:
    order = [
        (one.position, name, run.spec.workload)
        for run in report.workloads
        for name, side in run.sides.items()
        for one in side.rounds
    ]
    names = [name for _, name, _ in sorted(order)]
    assert names == [ON, OFF, OFF, ON] * 6
    for run in report.workloads:
        on, off = run.sides[ON].samples, run.sides[OFF].samples
        assert sorted((one.name, one.prompt) for one in on) == sorted((one.name, one.prompt) for one in off)
        assert len({one.prompt for one in on}) == len(on)
    assert not report.problems
    assert report.notes == ["a note"]


def test_what_is_remembered_is_found_faster_and_the_cost_of_a_miss_is_none(report: Report) -> None:
    told = {run.spec.workload: tell(run) for run in report.workloads}
    rows = {row.label: row for row in told["chat"].rows}
    assert rows["TTFT, seen before"].verdict == "faster"
    assert "Same answers with and without: 16 of 16." in told["chat"].sentences
    chat = report.workloads[0]
    on, off = summary(chat.spec, chat.sides[ON]), summary(chat.spec, chat.sides[OFF])
    assert on.cached_share is not None
    assert on.cached_share > 0.3
    assert off.cached_share == 0.0
    assert (on.answered, on.failed, on.unsent) == (16, 0, 0)
    # The page told the same before and after.
    assert on.figures == Figures(reused_tokens={"ram": 0.0})
    assert on.ttft_s.p90 is not None
    assert on.ttft_s.p99 is None
    assert "TTFT, seen before" not in {row.label for row in told["unique"].rows}


def test_warm_up_and_scale_are_sent_and_not_counted() -> None:
    with serving(good) as server:
        found = run({ON: server}, Asked(sessions=2, turns=1, tokens=50, rounds=1, warmup=4))
    begins = [one["messages"][0]["content"].split()[0] for one in server.bodies]
    assert begins == ["Scale", "Warm-up", "Warm-up", "Warm-up", "Warm-up", "Reference", "Reference"]
    assert len(found.workloads[0].sides[ON].samples) == 2
    assert server.keys == {"Bearer key"}
    assert found.chars_per_token == pytest.approx(4, rel=0.1)
    assert {one["model"] for one in server.bodies} == {MODEL}


def test_answers_that_differ_are_counted_and_do_not_pass_for_other_prompts() -> None:
    def other(handler: Handler, body: dict[str, Any]) -> None:
        handler.stream()
        handler.text(
            "something else"
            if "-2-1\n" in body["messages"][0]["content"]
            else f"answer {len(body['messages'])} of three"
        )
        handler.text("", "stop")
        handler.usage(10, 0, 3)
        handler.end()

    with serving(good) as on, serving(other) as off:
        found = run({ON: on, OFF: off})
    assert (
        "Same answers with and without: 14 of 15; 1 more had other prompts"
        in tell(found.workloads[0]).sentences[1]
    )


def test_reports_survive_the_file_and_are_shown(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(report.to_json())
    assert read_report(file) == report
    text = printed(report)
    for words in (
        "chat: 2 sessions of 2 turns",
        "document: 2 documents",
        "TTFT, new",
        "with against without",
        "a note",
    ):
        assert words in text
    page = page_html(report)
    assert page.count("<svg viewBox") >= 6
    assert not re.search("<script|<link|<img|src=|href=|url\\(|@import", page)


def test_a_page_escapes_what_comes_from_servers(tmp_path: Path) -> None:
    def act(handler: Handler, body: dict[str, Any]) -> None:
        if body["messages"][0]["content"].startswith("Reference"):
            handler.whole(400, '{"error": {"message": "<script>alert(1)</script>"}}')
        else:
            good(handler, body)

    with serving(act) as server:
        found = run({ON: server})
    write_page(tmp_path / "a.html", found)
    text = (tmp_path / "a.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert found.problems == ["chat, on: 8 of 8 requests failed"]
    with pytest.raises(ConfigError, match="--html"):
        write_page(tmp_path / "no" / "a.html", found)


def test_a_server_that_dies_midway_leaves_a_report_with_its_errors_counted() -> None:
    with serving(good) as on, serving(good) as off:

        def act(handler: Handler, body: dict[str, Any]) -> None:
            if len(off.bodies) < 8:
                good(handler, body)
            else:
                off.socket.close()
                handler.close_connection = True
                handler.connection.close()

        off.act = act
        found = run({ON: on, OFF: off}, Asked(sessions=12, turns=1, tokens=16, rounds=2))
    side = found.workloads[0].sides[OFF]
    one = summary(found.workloads[0].spec, side)
    assert one.answered >= 3
    assert one.faults.get("broken off", 0) + one.faults.get("no connection", 0) == one.failed > 0
    assert one.answered + one.failed + one.unsent == 24
    assert any("nobody listens" in problem for problem in found.problems)
    assert any("requests failed" in problem for problem in found.problems)
    assert "not sent" in printed(found)


def test_a_run_that_is_stopped_leaves_a_report_on_what_there_was() -> None:
    stop = Stop()

    def act(handler: Handler, body: dict[str, Any]) -> None:
        if len(handler.server.bodies) == 7:
            stop.ask()
            handler.server.let_go.wait(30)
        good(handler, body)

    with serving(act) as on, serving(good) as off:
        found = run({ON: on, OFF: off}, stop=stop)
    assert found.interrupted
    assert not found.problems
    one = summary(found.workloads[0].spec, found.workloads[0].sides[ON])
    assert (one.answered, one.cut, one.unsent) == (3, 1, 12)
    assert found.workloads[0].sides[OFF].samples == []
    assert "Interrupted" in printed(found)
    with pytest.raises(KeyboardInterrupt):
        stop.ask()


def refuses(handler: Handler, body: dict[str, Any]) -> None:
    handler.whole(401, '{"error": {"message": "wrong key"}}')


def test_what_cannot_begin_is_one_line() -> None:
    with serving(refuses) as server, pytest.raises(ConfigError, match=r"HTTP 401: wrong key"):
        run({ON: server})
    with serving(good) as server:
        server.context_tokens = 100
        with pytest.raises(
            ConfigError, match=r"--tokens 50: 'chat' grows to about .* beyond the 100 of fake-model"
        ):
            run({ON: server})
    with pytest.raises(ConfigError, match="lists no model"):
        run({ON: server})


def test_a_run_compared_with_itself_is_the_same_and_a_slower_one_is_slower(report: Report) -> None:
    again = compare_reports(report, report, ("a.json", "b.json"))
    verdicts = {ratio.verdict for part in again.parts for ratio in part.ratios.values()}
    assert verdicts == {"same"}

    def slow(handler: Handler, body: dict[str, Any]) -> None:
        good(handler, body, wait_s=0.12)

    with serving(slow) as on, serving(forgets) as off:
        slower = run({ON: on, OFF: off})
    found = compare_reports(report, slower, ("a.json", "b.json"))
    parts = {(part.workload, part.side): part.ratios for part in found.parts}
    assert set(parts) == {("chat", OFF), ("chat", ON)}
    assert parts["chat", ON]["ttft_again"].verdict == "slower"
    assert parts["chat", ON]["ttft_again"].margin >= MARGIN
    out = io.StringIO()
    show_comparison(found, Console(file=out, width=200, highlight=False))
    assert "slower" in out.getvalue()
    with pytest.raises(ConfigError, match="no workload in common"):
        compare_reports(replace(report, workloads=report.workloads[1:]), slower, ("a.json", "b.json"))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"format": 9}'])
def test_what_is_no_report_is_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "r.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is no report") as told:
        read_report(file)
    assert "\n" not in str(told.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_report(tmp_path / "none.json")


def test_stopped_before_anything_was_measured_there_is_no_report() -> None:
    stop = Stop()

    def act(handler: Handler, body: dict[str, Any]) -> None:
        stop.ask()
        handler.server.let_go.wait(30)

    with serving(act) as server, pytest.raises(KeyboardInterrupt):
        run({ON: server}, stop=stop)


def test_a_side_that_does_not_begin_later_on_is_a_problem_of_the_report() -> None:
    with serving(good) as on, serving(refuses) as off:
        found = run({ON: on, OFF: off})
    assert len(found.problems) == 1
    assert "off: " in found.problems[0]
    assert "HTTP 401" in found.problems[0]
    assert len(found.workloads[0].sides[ON].samples) == 4


def test_the_page_in_a_browser(report: Report, tmp_path: Path) -> None:
    """Nothing is blocked or asked for, and at a phone's width only tables scroll sideways."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium here: apt-get install chromium, or set CHROMIUM to one")
    write_page(tmp_path / "report.html", report)
    told: list[str] = []
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.on("console", lambda message: told.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("section > svg").count() == 6
        assert page.locator("td.faster").count() >= 1
        browser.close()
    assert told == []
    assert len(asked) == 1


@pytest.mark.parametrize("resident", [True, False])
def test_sides_that_may_not_stay_end_for_each_others_turn(resident: bool) -> None:
    calls: list[str] = []

    @dataclass(frozen=True)
    class Noted:
        name: str
        url: str
        what: str = "noted"
        token_bytes: int | None = None
        resident: bool = True

        def begin(self) -> Server:
            calls.append(f"begin {self.name}")
            return Server(self.url)

        def end(self) -> None:
            calls.append(f"end {self.name}")

    asked = Asked(sessions=1, turns=1, tokens=16, rounds=2, warmup=1)
    setup = Setup(documents=DOCUMENTS, model=None, api_key=None, run="abcd", command="")
    with serving(good) as server:
        sides = [Noted(name, server.url, resident=resident) for name in (ON, OFF)]
        run_bench([asked.spec("unique")], sides, setup, Screen(), Stop())
    warmed = sum("Warm-up" in one["messages"][0]["content"] for one in server.bodies)
    if resident:
        assert calls == ["begin on", "begin off", "end on", "end off"]
        assert warmed == 2
    else:
        # A B, B A; at the end everybody is ended again, which costs nothing.
        assert calls == ["begin on", "end on", "begin off", "end off", "begin on", "end on", "end off"]
        assert warmed == 3
