"""A daemon of an engine's own, for users who named none: started once, joined by all of its processes.

It ends by itself some seconds after the last of them left, however that happened.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from tiercel.errors import DaemonError

# `sun_path` of Linux' `struct sockaddr_un`, without the zero that ends it.
SOCKET_PATH_BYTES_MAX = 107
IDLE_EXIT = "10s"
# What is meant for the engine alone: the service manager that waits for it, and its threads' settings. With
# those, a preloaded OpenMP binds the daemon's first thread, and so all of them, to one of the engine's cores.
_ENGINES_OWN = re.compile(r"NOTIFY_SOCKET|LD_PRELOAD|(OMP|GOMP|KMP)_.*")
_READY_S = 30.0
_LINE_BYTES_MAX = 4096
_KEPT_S = 86400.0


def private_socket(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The socket of the private daemon called `name`, in a directory of this user alone."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    file = f"private-{digest}.sock"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.access(runtime, os.W_OK):
        path = Path(runtime, "tiercel", file)
        if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
            return path
    return Path(tempfile.gettempdir(), f"tiercel-{os.geteuid()}", file)


def ensure(path: Path, environ: Mapping[str, str]) -> None:
    """Have a daemon serve on `path`: the one that does already, or a new one with the settings of `environ`.

    Raises DaemonError with the daemon's own line when it cannot start.
    """
    with _alone(path):
        try:
            if not answers(path):
                _sweep(path.parent)
                _start(path, environ)
        except OSError as fault:  # no process, no descriptor, no log to be had
            raise DaemonError(f"no daemon can be started at '{path}': {fault.strerror}") from None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Whoever else owns the directory could put a socket of his there.
        if path.parent.stat().st_uid != os.geteuid():
            raise DaemonError(f"directory '{path.parent}' belongs to another user; set XDG_RUNTIME_DIR")
        fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as fault:
        raise DaemonError(f"directory '{path.parent}' cannot be used: {fault.strerror}") from None
    try:
        _lock(fd, path)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    until_s = time.monotonic() + _READY_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if time.monotonic() > until_s:
                raise DaemonError(
                    f"another process has been starting '{path}' for {_READY_S:.0f} s"
                ) from None
            time.sleep(0.05)


def answers(path: Path) -> bool:
    """Whether somebody listens on `path`, be he busy."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            pass  # somebody is there, and busy
    return True


def _sweep(folder: Path) -> None:
    """Remove what private daemons of engines long gone have left: each engine has a name of its own."""
    for log_path in folder.glob("private-*.log"):
        with suppress(OSError):
            old = time.time() - log_path.stat().st_mtime > _KEPT_S
            if old and not answers(log_path.with_suffix(".sock")):
                for suffix in (".sock", ".lock", ".log"):
                    log_path.with_suffix(suffix).unlink(missing_ok=True)


def _start(path: Path, environ: Mapping[str, str]) -> None:
    command = [
        sys.executable, "-m", "tiercel", "daemon", "--socket", os.fspath(path), "--exit-when-idle", IDLE_EXIT,
    ]  # fmt: skip
    log_path = path.with_suffix(".log")
    with open(log_path, "wb") as log:
        # A session of its own: Ctrl-C at the engine must not cut the flush short.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={name: text for name, text in environ.items() if not _ENGINES_OWN.fullmatch(name)},
            start_new_session=True,
        )
    _unpin(process.pid)
    assert process.stdout is not None
    with process.stdout as ready:
        if _first_line(ready.fileno()):
            # Reaps it when it ends, should that be before us.
            threading.Thread(target=process.wait, name="tiercel-daemon-wait", daemon=True).start()
            return
    process.kill()
    process.wait()
    said = log_path.read_text(errors="replace").strip().splitlines()
    raise DaemonError(said[-1].removeprefix("tiercel: ") if said else f"no daemon came up at '{path}'")


def _unpin(pid: int) -> None:
    """Let a process run on every CPU of the host: engines pin their threads, and children inherit that."""
    with suppress(OSError):
        os.sched_setaffinity(pid, range(os.cpu_count() or 1))


def _first_line(fd: int) -> bytes:
    ready, _, _ = select.select([fd], [], [], _READY_S)
    return os.read(fd, _LINE_BYTES_MAX) if ready else b""
