"""The proxy's faults happen: each shows at a plain echo server, and heals."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.servers.proxy import (
    BlackHole,
    Corrupt,
    Cut,
    Delay,
    FaultProxy,
    Throttle,
    Truncate,
    swallowing_port,
)

BYTES = bytes(range(256)) * 400


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    listener = socket.create_server(("127.0.0.1", 0))

    def echo(connection: socket.socket) -> None:
        with connection:
            try:
                while chunk := connection.recv(1 << 16):
                    connection.sendall(chunk)
            except OSError:
                return

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    with FaultProxy("127.0.0.1", listener.getsockname()[1]) as made:
        yield made
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    server.join(5)


def exchange(proxy: FaultProxy, sent: bytes = BYTES, wait_s: float = 2.0) -> bytes:
    """What comes back until everything is there, or the connection ends."""
    got = b""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=wait_s) as client:
        client.sendall(sent)
        while len(got) < len(sent):
            chunk = client.recv(1 << 16)
            if not chunk:
                break
            got += chunk
    return got


def test_without_a_fault_everything_passes(proxy: FaultProxy) -> None:
    assert exchange(proxy) == BYTES
    assert proxy.fired == 0
    assert proxy.passed_bytes == {"up": len(BYTES), "down": len(BYTES)}


def test_truncate_ends_in_order_after_so_many_bytes(proxy: FaultProxy) -> None:
    proxy.set(down=Truncate(after_bytes=1000))
    assert exchange(proxy) == BYTES[:1000]
    assert proxy.fired == 1
    proxy.heal()
    assert exchange(proxy) == BYTES
    assert proxy.fired == 1


def test_cut_resets(proxy: FaultProxy) -> None:
    proxy.set(down=Cut(after_bytes=70_000))
    with pytest.raises(ConnectionResetError):
        exchange(proxy)
    assert proxy.fired == 1


def test_corrupt_flips_one_bit(proxy: FaultProxy) -> None:
    proxy.set(down=Corrupt(at_byte=70_000))
    got = exchange(proxy)
    assert [at for at in range(len(BYTES)) if got[at] != BYTES[at]] == [70_000]
    assert exchange(proxy) == BYTES


def test_a_black_hole_swallows_until_healed(proxy: FaultProxy) -> None:
    proxy.set(up=BlackHole())
    with pytest.raises(TimeoutError):
        exchange(proxy, wait_s=0.3)
    assert proxy.fired >= 1
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
        client.sendall(b"late")
        time.sleep(0.2)
        proxy.heal()
        assert client.recv(4) == b"late"


def test_delay_and_throttle_are_slow(proxy: FaultProxy) -> None:
    for fault in (Delay(0.3), Throttle(300_000)):
        proxy.set(down=fault)
        started_s = time.monotonic()
        assert exchange(proxy, wait_s=5) == BYTES
        assert time.monotonic() - started_s > 0.25
        assert fault.fired


def test_refuse_and_open_again(proxy: FaultProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=2) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        exchange(proxy)
    proxy.open()
    assert exchange(proxy) == BYTES


def test_a_swallowing_port_answers_nothing() -> None:
    with swallowing_port() as port, pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port), timeout=0.3)
