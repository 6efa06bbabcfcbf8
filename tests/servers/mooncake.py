"""A Mooncake master and storage processes for tests, in a network namespace of their own.

Their data ports bind to all addresses and there is no switch for it, so nothing starts outside `own_network`.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import importlib.util
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

_NEW_NETWORK = 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_READY_S = 30.0

# A storage process: it gives memory to the pool and does nothing else.
_PEER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print("ready" if code == 0 else code, flush=True)
time.sleep(3600)
"""


def why_not() -> str | None:
    """Why tests with Mooncake cannot run here, or None if they can."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake's client is not installed (pip install 'tiercel[mooncake]')"
    # Read once, at the import.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        importlib.import_module("mooncake.store")
    except ImportError as fault:
        return f"Mooncake's client cannot be loaded: {fault} (Debian: apt install libibverbs1 libnuma1)"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    if tried.returncode:
        return "no network namespace can be made here: Mooncake's ports would be open to all"
    return None


@contextmanager
def own_network() -> Iterator[None]:
    """Move this thread, and all threads and processes it starts, to a network with only a loopback."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "unshare")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sH14x", b"lo", 0)
            flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))[1]
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
        yield
    finally:
        if libc.setns(home, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(home)


class _Process:
    """A child that can be killed, stopped and continued."""

    _child: subprocess.Popen[str] | None = None

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            if self._child.stdout is not None:
                self._child.stdout.close()
            self._child = None

    def stop(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        assert self._child is not None
        self._child.send_signal(signal.SIGSTOP)
        # Only now does nothing answer any more.
        os.waitpid(self._child.pid, os.WUNTRACED)

    def go_on(self) -> None:
        assert self._child is not None
        self._child.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Master(_Process):
    """`mooncake_master` on loopback. It forgets a client that is silent for `client_ttl_s`."""

    def __init__(self, folder: Path, *, client_ttl_s: int = 2) -> None:
        self.port, self.admin_port = free_port(), free_port()
        self._log = folder / "master.log"
        self._client_ttl_s = client_ttl_s

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, **params: object) -> str:
        """The URL of a tier on this master."""
        more = "".join(f"&{name}={value}" for name, value in params.items())
        return f"mooncake://{self.address}?admin={self.admin_port}{more}"

    def start(self) -> None:
        with self._log.open("a") as log:
            self._child = subprocess.Popen(
                [
                    str(Path(str(importlib.util.find_spec("mooncake").origin)).parent / "mooncake_master"),  # type: ignore[union-attr]
                    "-rpc_address=127.0.0.1",
                    f"-rpc_port={self.port}",
                    "-metrics_host=127.0.0.1",
                    f"-metrics_port={self.admin_port}",
                    f"-client_ttl={self._client_ttl_s}",
                ],
                stdout=log,
                stderr=log,
                text=True,
            )
        _eventually(lambda: b"ok" in self.ask("/health"), "the master does not start")

    def ask(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=5) as reply:
            body: bytes = reply.read()
        return body

    def segments(self) -> int:
        """How many processes give memory to the pool."""
        return len(self.ask("/get_all_segments").split())

    def keys(self) -> list[str]:
        return self.ask("/get_all_keys").decode().split()


class Peer(_Process):
    """A process that gives `segment_bytes` of memory to the pool."""

    def __init__(self, master: Master, segment_bytes: int) -> None:
        self._master = master
        self._segment_bytes = segment_bytes

    def start(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", _PEER, self._master.address, str(self._segment_bytes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._child.stdout is not None
        assert self._child.stdout.readline().strip() == "ready"


def free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        port: int = any_socket.getsockname()[1]
        return port


def _eventually(condition: object, otherwise: str) -> None:
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s:
        try:
            if condition():  # type: ignore[operator]
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(otherwise)
