"""Cases of `bench_tiers` for Valkey: over TCP and a Unix socket, against a bare socket and valkey-py.

The bare client is the least that one connection needs: one call that sends, one that receives.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import valkey
from tests.servers.valkey import ValkeyServer

from benchmarks.bench_tiers import Case, Client
from tiercel.tiers.url import TierUrl
from tiercel.tiers.valkey import open_valkey

PREFIX = b"bench:"


@contextmanager
def cases(folder: Path) -> Iterator[list[Case]]:
    """A server of its own, and both ways to reach it."""
    with ValkeyServer(folder, maxmemory="6gb", maxmemory_policy="noeviction") as server:
        tcp, unix = f"valkey://127.0.0.1:{server.port}", f"valkey://{server.socket}"
        yield [
            _case("valkey tcp", tcp, lambda: _tcp(server.port), port=server.port),
            _case("valkey unix", unix, lambda: _unix(server.socket), unix_socket_path=str(server.socket)),
        ]


def _case(name: str, url: str, dial: Callable[[], socket.socket], **reach: object) -> Case:
    tier = open_valkey(TierUrl.parse(url), name=name, deadline_s=30, slot_bytes=1 << 20)
    return Case(name, tier, {"bare socket": _bare(dial), "valkey-py": _library(reach)})


def _bare(dial: Callable[[], socket.socket]) -> Client:
    local = threading.local()

    def connection() -> socket.socket:
        if not hasattr(local, "socket"):
            local.socket = dial()
        return local.socket

    def put(name: str, record: memoryview) -> None:
        key, wire = PREFIX + name.encode(), connection()
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(record))
        parts = [memoryview(head), record, memoryview(b"\r\n")]
        while parts:
            sent = wire.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
        assert wire.recv(64) == b"+OK\r\n"

    def get(name: str, record: memoryview) -> None:
        key, wire = PREFIX + name.encode(), connection()
        wire.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        head = b"$%d\r\n" % len(record)
        assert wire.recv(len(head), socket.MSG_WAITALL) == head
        done = 0
        while done < len(record):
            done += wire.recv_into(record[done:])
        assert wire.recv(2, socket.MSG_WAITALL) == b"\r\n"

    return Client(put, get)


def _library(reach: dict[str, object]) -> Client:
    client = valkey.Valkey(**reach)

    def get(name: str, record: memoryview) -> None:
        record[:] = client.get(PREFIX + name.encode())

    return Client(lambda name, record: client.set(PREFIX + name.encode(), record), get)


def _tcp(port: int) -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port))
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def _unix(path: Path) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX)
    opened.connect(str(path))
    return opened
