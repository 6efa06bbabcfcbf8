"""One call on a thread of its own, waited for so long and no longer: a place that hangs must not hang us.

A call that does not come back is left behind; its thread ends with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from tiercel.doctor.finding import Finding, fail
from tiercel.errors import TiercelError

T = TypeVar("T")


class _Call(Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.answer: list[T] = []
        self.fault = ""
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.answer.append(self._call())
        except TiercelError as fault:
            self.fault = " ".join(str(fault).split())
        except OSError as fault:
            self.fault = " ".join(filter(None, (fault.filename, fault.strerror or str(fault))))
        finally:
            self.done.set()


def within(deadline_s: float, call: Callable[[], T]) -> T | str:
    """What `call` answers; a sentence when it fails as things fail, or has not answered in time."""
    one = _Call(call)
    threading.Thread(target=one.run, name="tiercel-doctor", daemon=True).start()
    if not one.done.wait(deadline_s):
        return f"no answer within {deadline_s:g} s"
    # Neither answer nor fault: an error of ours or of a tier's author, whose trace the thread has printed.
    return one.answer[0] if one.answer else one.fault or "the check ended with an error"


def found_within(deadline_s: float, check: Callable[[], Finding], advice: str) -> Finding:
    """What a check finds; FAIL with this advice when it cannot tell in time."""
    answer = within(deadline_s, check)
    return fail(answer, advice) if isinstance(answer, str) else answer
