"""Processes that this one starts and answers for: they end when it ends, however it ends.

Each has a session of its own, so that Ctrl-C in a terminal reaches this process alone, which then ends
them in the right order. Should this process be killed, the kernel sends them SIGTERM.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from tiercel.errors import ConfigError

_PR_SET_PDEATHSIG = 1


class Child:
    """A running process and all that it starts; what it says goes to `log`, if there is one.

    Raises ConfigError when it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        reads_output: bool = False,
        log: IO[bytes] | None = None,
    ) -> None:
        try:
            # Started from the main thread: the kernel watches the thread that forks.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if reads_output else log,
                stderr=log,
                env=dict(environ),
                start_new_session=True,
                preexec_fn=_dies_with(os.getpid()),
            )
        except OSError as fault:
            raise ConfigError(f"'{command[0]}' cannot be started: {fault.strerror}") from None

    @property
    def exit_code(self) -> int | None:
        """As a shell tells it; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> int:
        """SIGTERM, SIGKILL after `grace_s` seconds or when `hurry` says so. The exit code."""
        self.process.terminate()
        waited_s = 0.0
        while self.process.poll() is None and waited_s < grace_s and not hurry():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)
            waited_s += 0.2
        # Whatever it started and left behind, itself included.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        code = self.exit_code
        assert code is not None
        return code


def _dies_with(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return prepare
