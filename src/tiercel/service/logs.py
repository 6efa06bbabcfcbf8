"""How a process of ours logs: one line an event on stderr, as text or JSON, with the request it belongs to.

    record -> at most one warning of a kind a minute -> a line -> bounded queue -> one thread -> stderr

Never writes what an exception says, only its kind and place: it may quote a prompt. Never makes anybody wait
for a terminal or a pipe that is not read: lines beyond the queue's bound are dropped and counted.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import re
import sys
import threading
import time
import traceback
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

FORMATS = ("text", "json")
# The request that the running code works for; contexts of tasks and jobs carry it.
request_id: ContextVar[str | None] = ContextVar("tiercel_request_id", default=None)

_QUIET_S = 60.0
_KINDS_MAX = 256
_KIND_CHARS_MAX = 200
_LINES_MAX = 4096
_FLUSH_S = 2.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")


def set_up(form: str, loud: tuple[str, ...] = ()) -> None:
    """Log the whole process to stderr as `form`: warnings, and of the loggers in `loud` what they tell.

    Replaces handlers that were there. Lines are written behind; they are out when the process ends in order.
    """
    handler = LineWriter(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.addFilter(Limiter())
    # A record that cannot be written would be printed with its arguments.
    logging.raiseExceptions = False
    # Python's own would print the traceback with the exception's words.
    threading.excepthook = _thread_ended
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in loud:
        logging.getLogger(name).setLevel(logging.INFO)


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        place = place_of(ended.exc_value)
        logging.getLogger("tiercel").error("a thread ended: %s", place, extra={"kind": place})


def limit_faults() -> None:
    """Hold back our own repeated warnings in a process that logs in its own way, such as an engine's."""
    logger = logging.getLogger("tiercel")
    if not any(isinstance(one, Limiter) for one in logger.filters):
        logger.addFilter(Limiter())


def sane_id(given: str) -> str | None:
    """`given`, if it may stand in logs and headers: up to 128 visible characters, no spaces or quotes."""
    return given if _ID.fullmatch(given) else None


def place_of(fault: BaseException) -> str:
    """Kind and innermost place of an exception, for a log: its text is left out, it may quote a prompt."""
    frames = traceback.extract_tb(fault.__traceback__)
    where = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames[-4:]))
    return f"{type(fault).__name__} at {where or 'an unknown place'}"


class Limiter(logging.Filter):
    """Lets one warning of a kind through a minute, which tells how many were held back before it.

    A record's kind is its `kind` (`extra={"kind": "disk.full"}`), else its message before anything is filled
    in. What is no warning passes.
    """

    def __init__(self, quiet_s: float = _QUIET_S) -> None:
        super().__init__()
        self._quiet_s = quiet_s
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}  # kind -> when it was let through, how many since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it now."""
        if record.levelno < logging.WARNING:
            return True
        kind, now_s = _kind_of(record), time.monotonic()
        with self._lock:
            last_s, held_back = self._seen.pop(kind, (-math.inf, 0))
            if now_s - last_s < self._quiet_s:
                self._seen[kind] = (last_s, held_back + 1)
                return False
            self._seen[kind] = (now_s, 0)
            if len(self._seen) > _KINDS_MAX:
                del self._seen[next(iter(self._seen))]
        if held_back:
            told = f"{_message(record)} ({held_back} more of this kind before)"
            record.msg, record.args = told, ()
        return True


def _kind_of(record: logging.LogRecord) -> str:
    template = str(record.msg)
    kind = getattr(record, "kind", None) or (_message(record) if template == "%s" else template)
    return f"{record.name} {kind}"[:_KIND_CHARS_MAX]


def _message(record: logging.LogRecord) -> str:
    """A record's message, or what it was to be filled into when its arguments do not fit."""
    try:
        return record.getMessage()
    except (ValueError, TypeError, KeyError):
        return str(record.msg)


def _told(record: logging.LogRecord) -> str:
    message = _message(record)
    fault = record.exc_info[1] if record.exc_info else None
    if fault is not None and record.name == "asyncio":
        # It shows the fault itself, and what the callback was called with.
        message = "a fault in the event loop"
    return message if fault is None else f"{message.strip()}: {place_of(fault)}"


class TextLines(logging.Formatter):
    """`tiercel: message [request ID]`: one line, whatever the message holds."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        told = "".join(
            one if one.isprintable() else one.encode("unicode_escape").decode() for one in _told(record)
        )
        ours = request_id.get()
        return f"tiercel: {told}" if ours is None else f"tiercel: {told} [request {ours}]"


class JsonLines(logging.Formatter):
    """One JSON object: `time`, `level`, `logger`, `message`, `request_id`, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": at.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name,
            "message": _told(record),
        }  # fmt: skip
        if (ours := request_id.get()) is not None:
            line["request_id"] = ours
        return json.dumps(line | dict(getattr(record, "fields", {})), default=str)


class LineWriter(logging.Handler):
    """Writes lines to `stream` on a thread of its own. Nothing waits for it but `flush`, for 2 s at most."""

    def __init__(self, stream: TextIO, lines_max: int = _LINES_MAX) -> None:
        super().__init__()
        self._stream, self._lines_max = stream, lines_max
        self._dropped = 0
        # Not queue.Queue: what the garbage collector makes log must not meet a lock that its thread holds.
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tiercel-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line; drop it when too many wait."""
        if self._lines.qsize() >= self._lines_max:
            self._dropped += 1
            return
        self._lines.put(self.format(record))

    def flush(self) -> None:
        """Wait until what was logged so far is written."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(_FLUSH_S)

    def _run(self) -> None:
        while True:
            item = self._lines.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._write(item)
            if (dropped := self._dropped) and self._lines.qsize() < self._lines_max // 2:
                self._dropped -= dropped
                words = f"{dropped} lines were dropped: what reads this log is too slow"
                self._write(self.format(logging.makeLogRecord({"msg": words, "name": "tiercel"})))

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # closed, or nobody is there
            self._stream.write(f"{line}\n")
            self._stream.flush()
