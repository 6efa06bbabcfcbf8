"""Mooncake Store's own client, bounded: what its native library does not guard is guarded here.

The library waits for its own time limits only, ends the process when it is called after its close, and holds
the interpreter lock while it sets up or closes. So the limits are set before it starts, calls and close
exclude each other, and a master that does not answer is found out before either of the two.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tiercel.errors import TierError
from tiercel.tiers.mooncake_admin import Admin
from tiercel.tiers.mooncake_url import MooncakeOptions

# A client is given up, not closed, while a call is still in it or its master does not answer.
_given_up: list[object] = []


class Client:
    """A client of one pool, connected. Raises `OSError` when the master does not answer in time."""

    def __init__(self, options: MooncakeOptions, deadline_s: float) -> None:
        self.options = options
        self.admin = (
            None if options.admin_port is None else Admin(options.host, options.admin_port, deadline_s)
        )
        self._deadline_s = deadline_s
        self._idle = threading.Condition()
        self._running = 0
        self._closed = False
        _limit_waits(deadline_s)
        # Any: the library has no types.
        library: Any = _library()
        local = self._reach()
        self._native: Any = library.MooncakeDistributedStore()
        self._config = library.ReplicateConfig()
        self._config.replica_num = options.replicas
        if options.soft_pin:
            self._config.soft_pin_action = library.SoftPinAction.ENABLE
        host = f"[{options.host}]" if ":" in options.host else options.host
        code = self._native.setup(
            local_hostname=options.local or local,
            metadata_server=options.metadata,
            global_segment_size=options.segment_bytes,
            local_buffer_size=0,
            protocol=options.protocol,
            rdma_devices=options.devices,
            master_server_addr=f"{host}:{options.port}",
        )
        if code != 0:
            raise OSError(errno.ECONNREFUSED, f"the client could not be set up (code {code})")

    def exist(self, names: list[str]) -> list[int]:
        """1, 0 or a negative code for each name. Keeps what is there from eviction for a while."""
        return list(self._call("batch_is_exist", names))

    def get_into(self, names: list[str], buffers: list[memoryview]) -> list[int]:
        """Bytes read into each buffer, or a negative code."""
        return self._move("batch_get_into", names, buffers)

    def put_from(self, names: list[str], buffers: list[memoryview]) -> list[int]:
        """0 or a negative code for each. A name that exists already is left as it is, and 0."""
        return self._move("batch_put_from", names, buffers, self._config)

    def upsert_from(self, names: list[str], buffers: list[memoryview]) -> list[int]:
        """0 or a negative code for each. Replaces; who reads it at that moment may get a mixture."""
        return self._move("batch_upsert_from", names, buffers, self._config)

    def get_start(self, name: str, buffer: memoryview) -> int:
        """Fill `buffer` with the beginning of a record: its length, or a negative code."""
        with self._usable([buffer], register=True) as (addresses, sizes):
            answer = self._call("get_into_ranges", addresses, [[name]], [[[0]]], [[[0]]], [[sizes]])
        return int(answer[0][0][0])

    def remove(self, names: list[str]) -> list[int]:
        """0 or a negative code for each; leases of readers do not delay it."""
        return list(self._call("batch_remove", names, True))

    def size_of(self, name: str) -> int:
        """Bytes of a record, or a negative code."""
        return int(self._call("get_size", name))

    def close(self) -> None:
        """End the client, unless a call does not end or the master does not answer: then leave it behind."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: not self._running, self._deadline_s)
            busy = self._running > 0
        native, self._native = self._native, None
        try:
            if busy:
                raise TimeoutError
            self._reach()
        except OSError:
            _given_up.append(native)
        else:
            native.close()

    def _reach(self) -> str:
        """Our address on the way to the master. Raises `OSError` if it is not there or hangs."""
        with socket.create_connection(
            (self.options.host, self.options.port), timeout=self._deadline_s
        ) as connection:
            local: str = connection.getsockname()[0]
        if self.admin is not None:
            self.admin.check()
        return local

    def _move(self, call: str, names: list[str], buffers: list[memoryview], *more: object) -> list[int]:
        # Sockets take any memory, and whole records: measured the same with and without registration.
        with self._usable(buffers, register=self.options.protocol != "tcp") as (addresses, sizes):
            return list(self._call(call, names, addresses, sizes, *more))

    @contextmanager
    def _usable(self, buffers: list[memoryview], *, register: bool) -> Iterator[tuple[list[int], list[int]]]:
        """Addresses and sizes of buffers that the transport may use meanwhile. Raises `OSError`."""
        held = [(ctypes.c_char * len(buffer)).from_buffer(buffer) for buffer in buffers]
        addresses = [ctypes.addressof(one) for one in held]
        sizes = [len(buffer) for buffer in buffers]
        registered: list[int] = []
        try:
            for address, size in zip(addresses, sizes, strict=True) if register else ():
                if code := int(self._call("register_buffer", address, size)):
                    raise OSError(errno.ENOMEM, f"memory cannot be registered (code {code})")
                registered.append(address)
            yield addresses, sizes
        finally:
            for address in registered:
                self._call("unregister_buffer", address)

    def _call(self, call: str, *args: object) -> Any:
        """Make a call of the library's unless it was closed, which would end the process."""
        with self._idle:
            if self._closed:
                raise OSError(errno.EBADF, "closed")
            self._running += 1
            method = getattr(self._native, call)
        try:
            return method(*args)
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()


def _limit_waits(deadline_s: float) -> None:
    """Bound the library's waits, for the process and before its first use. What the user set stays."""
    half_s = deadline_s / 2
    limits = {
        "MC_RPC_TIMEOUT_MS": max(100, round(half_s * 1000)),
        "MC_RPC_CONNECT_TIMEOUT_MS": max(100, round(half_s * 1000)),
        "MC_TCP_STATUS_TIMEOUT_SEC": max(1, math.floor(half_s)),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": max(1, math.floor(half_s)),
        # By default it tries to set up for a minute and a half.
        "MC_STORE_CLIENT_SETUP_RETRIES": 1,
        "MC_LOG_LEVEL": "ERROR",
    }
    for name, value in limits.items():
        os.environ.setdefault(name, str(value))


def _library() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as fault:
        if "shared object" not in str(fault):
            raise
        raise TierError(
            f"Mooncake's client cannot be loaded ({fault}); accepted: a host with libibverbs and libnuma "
            "(Debian: apt install libibverbs1 libnuma1)"
        ) from None
