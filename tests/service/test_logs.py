"""Lines of a log: one an event, one warning of a kind a minute, never an exception's words, never a wait."""

from __future__ import annotations

import ast
import asyncio
import gc
import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.service import logs
from tiercel.service.logs import JsonLines, Limiter, LineWriter, TextLines, place_of, request_id, sane_id

SOURCE = Path(__file__).parents[2] / "src" / "tiercel"
SECRET = "the words of a prompt"
LOUD = {"debug", "info", "warning", "error", "exception", "critical"}


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    one = logging.getLogger("tiercel.tests.logs")
    one.propagate = False
    one.setLevel(logging.DEBUG)
    yield one
    one.handlers.clear()
    one.filters.clear()


def written(logger: logging.Logger, formatter: logging.Formatter) -> tuple[io.StringIO, LineWriter]:
    stream = io.StringIO()
    handler = LineWriter(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return stream, handler


def test_a_warning_of_a_kind_comes_once_and_says_later_how_many_there_were(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D41: one line a kind and minute."""
    stream, handler = written(logger, TextLines())
    handler.addFilter(Limiter())
    now_s = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s[0])
    for at in range(50):
        logger.warning("process %d was turned away", at)
        logger.info("told %d", at)
        logger.warning("disk: full", extra={"kind": f"{'ab'[at % 2]}.full"})
    now_s[0] += 61
    logger.warning("process %d was turned away", 77)
    handler.flush()
    lines = stream.getvalue().splitlines()
    assert sum("told" in one for one in lines) == 50, "what is no warning is never held back"
    assert sum("disk: full" in one for one in lines) == 2, "one a kind"
    assert [one for one in lines if "turned away" in one] == [
        "tiercel: process 0 was turned away",
        "tiercel: process 77 was turned away (49 more of this kind before)",
    ]


def test_neither_the_event_loop_nor_a_thread_that_ends_tells_what_a_fault_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(logs.sys, "stderr", stream)
    logs.set_up("json")

    def failing(*_: object) -> None:
        raise ValueError(SECRET)

    async def fire_and_forget() -> None:
        async def fail() -> None:
            failing()

        asyncio.get_running_loop().call_soon(failing, SECRET)
        task = asyncio.create_task(fail())
        while not task.done():
            await asyncio.sleep(0)
        del task
        gc.collect()

    asyncio.run(fire_and_forget())
    thread = threading.Thread(target=failing)
    thread.start()
    thread.join()
    for handler in logging.getLogger().handlers:
        handler.flush()
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    # Threads of other tests may end meanwhile, and say so.
    ours = [one["message"] for one in told if one["logger"] in ("asyncio", "tiercel")]
    assert [one.partition(": ValueError at ")[0] for one in ours] == [
        "a fault in the event loop", "a fault in the event loop", "a thread ended",
    ]  # fmt: skip
    assert SECRET not in stream.getvalue()


def test_kinds_are_bounded(logger: logging.Logger) -> None:
    limiter = Limiter()
    for at in range(2000):
        record = logger.makeRecord("x", logging.WARNING, "", 0, "%s", (f"{at} " + "x" * 500,), None)
        assert limiter.filter(record)
        assert not limiter.filter(record)
    assert len(limiter._seen) <= logs._KINDS_MAX
    assert max(map(len, limiter._seen)) <= logs._KIND_CHARS_MAX


@given(st.text(), st.sampled_from([None, "abc"]))
def test_a_text_line_is_one_line_and_a_json_line_is_json(message: str, ours: str | None) -> None:
    record = logging.makeLogRecord({"name": "tiercel", "msg": "%s", "args": (message,)})
    token = request_id.set(ours)
    try:
        text, line = TextLines().format(record), json.loads(JsonLines().format(record))
    finally:
        request_id.reset(token)
    assert text.isprintable()
    assert text.startswith("tiercel: ")
    assert text.endswith(" [request abc]") == (ours is not None)
    assert line["message"] == message
    assert line.get("request_id") == ours
    assert line["time"].endswith("Z")


@given(st.text())
def test_an_id_that_is_taken_over_can_stand_anywhere(given_id: str) -> None:
    kept = sane_id(given_id)
    assert kept is None or (
        kept == given_id and kept.isascii() and kept.isprintable() and 0 < len(kept) < 129
    )
    assert kept is None or not set(kept) & set(" \"'\\<>{}%,;")


@pytest.mark.parametrize("good", ["a", "0195-ab_c.d:e/f+g=h@i", "x" * 128])
def test_common_ids_are_taken_over(good: str) -> None:
    assert sane_id(good) == good


@pytest.mark.parametrize("bad", ["", "a b", "a\nb", "x" * 129, "é", "-x", 'a"b'])
def test_odd_ids_are_not(bad: str) -> None:
    assert sane_id(bad) is None


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()])
def test_an_exceptions_words_are_not_written(logger: logging.Logger, formatter: logging.Formatter) -> None:
    stream, handler = written(logger, formatter)
    try:
        raise ValueError(SECRET)
    except ValueError:
        logger.exception("it failed\n")
    # Arguments that do not fit would be printed by logging itself.
    odd = logger.makeRecord("x", logging.WARNING, "", 0, "no %d of this", (SECRET,), None)
    for _ in range(2):
        handler.handle(odd)
    handler.flush()
    assert SECRET not in stream.getvalue()
    assert "it failed: ValueError at " in stream.getvalue(), "the control: kind and place are"
    assert stream.getvalue().count("\n") == 3
    assert stream.getvalue().count("no %d of this") == 2


def test_nobody_waits_for_a_log_that_is_not_read(logger: logging.Logger) -> None:
    reading = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            reading.wait(20)
            return super().write(text)

    stream = Stuck()
    handler = LineWriter(stream, lines_max=100)
    handler.setFormatter(TextLines())
    logger.addHandler(handler)
    for at in range(1000):
        logger.info("line %d", at)
    assert stream.getvalue() == "", "the fault is there: nothing is read"
    reading.set()
    handler.flush()
    logger.info("the last")
    handler.flush()
    lines = stream.getvalue().splitlines()
    kept = sum(one.startswith("tiercel: line ") for one in lines)
    assert 100 <= kept <= 102
    assert f"tiercel: {1000 - kept} lines were dropped: what reads this log is too slow" in lines
    assert "tiercel: the last" in lines


def test_a_log_that_is_closed_harms_nobody(logger: logging.Logger) -> None:
    stream, handler = written(logger, TextLines())
    stream.close()
    logger.info("into the void")
    handler.flush()


def test_a_place_is_told_without_words() -> None:
    with suppress(RuntimeError):
        raise RuntimeError(SECRET)
    assert place_of(RuntimeError(SECRET)) == "RuntimeError at an unknown place"


def calls_of_loggers(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LOUD
            and ast.unparse(node.func.value) in ("log", "_log", "logger", 'logging.getLogger("tiercel")',
                                                 "logging.getLogger('tiercel')", "logging")
        ):  # fmt: skip
            yield node


def test_every_line_that_we_log_has_a_kind() -> None:
    """Its kind is its first argument, so that is constant; loggers are ours, so the limiter sees them."""
    seen = 0
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for call in calls_of_loggers(tree):
            seen += 1
            where = f"{path.name}:{call.lineno}"
            assert isinstance(call.func, ast.Attribute)
            assert ast.unparse(call.func.value) != "logging", f"{where}: the root logger"
            assert call.func.attr != "exception", f"{where}: an exception's words"
            assert isinstance(call.args[0], ast.Constant), f"{where}: its kind is not constant"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger" and node.args:
                name = node.args[0]
                ours = isinstance(name, ast.Constant) and str(name.value).startswith("tiercel")
                assert ours or path.name == "logs.py", f"{path.name}:{node.lineno}"
    assert seen > 15, "the control: they are found"
