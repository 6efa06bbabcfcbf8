"""The first process' side of the restart: starts the second process, listens, and never waits for ever."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import IO

import msgspec

from tiercel.demo.messages import LINE_BYTES_MAX, Done, Failed, Job, Message
from tiercel.errors import TiercelError

COMMAND = (sys.executable, "-m", "tiercel.demo.resume")
_STDERR_CHARS = 300
_KILL_WAIT_S = 5.0
_MESSAGES_MAX = 4096


class RestartError(TiercelError):
    """The second process failed, in one line."""


def second_process(
    job: Job, deadline_s: float, command: Sequence[str] = COMMAND
) -> Generator[Message, None, None]:
    """Run the second process and yield what it says, until `Done`.

    Blocks up to `deadline_s` in all; the process has ended when the iterator has. Raises RestartError when it
    fails, dies, talks nonsense or takes longer.
    """
    until_s = time.monotonic() + deadline_s
    with tempfile.TemporaryFile() as stderr:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"},
            )
        except OSError as error:
            raise RestartError(f"the second process cannot be started: {error.strerror}") from None
        try:
            _hand_over(child, job)
            yield from _listen(child, until_s, deadline_s, stderr)
        finally:
            _end(child)


def _hand_over(child: subprocess.Popen[bytes], job: Job) -> None:
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it died already; listening tells how
        child.stdin.write(msgspec.json.encode(job))
        child.stdin.close()


def _listen(
    child: subprocess.Popen[bytes], until_s: float, deadline_s: float, stderr: IO[bytes]
) -> Generator[Message, None, None]:
    lines: queue.Queue[bytes] = queue.Queue(_MESSAGES_MAX)
    threading.Thread(target=_read, args=(child, lines), name="tiercel-demo-restart", daemon=True).start()
    decoder = msgspec.json.Decoder(Message)
    while True:
        try:
            line = lines.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise RestartError(f"the second process was not done after {deadline_s:g} s") from None
        if not line:
            raise RestartError(f"the second process ended early{_how(child, stderr)}")
        try:
            message = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RestartError(f"the second process said something that is no message: {error}") from None
        if isinstance(message, Failed):
            raise RestartError(f"the second process failed: {message.reason}")
        yield message
        if isinstance(message, Done):
            return


def _read(child: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
    """Pass lines on; an empty one is the end. Bounded: a process that floods us is held back by its pipe."""
    assert child.stdout is not None
    with suppress(ValueError, OSError):  # closed by whoever listened, who has gone
        while line := child.stdout.readline(LINE_BYTES_MAX):
            lines.put(line)
        lines.put(b"")


def _how(child: subprocess.Popen[bytes], stderr: IO[bytes]) -> str:
    """How the process ended, with the last line it complained about."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(_KILL_WAIT_S)
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    said = f": {lines[-1].strip()[:_STDERR_CHARS]}" if lines else ""
    code = child.returncode
    how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return f" ({how}){said}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """See the process off: wait a moment for a clean end, then kill it."""
    try:
        child.wait(_KILL_WAIT_S if sys.exc_info()[0] is None else 0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
