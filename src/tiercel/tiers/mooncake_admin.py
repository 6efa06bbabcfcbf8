"""A Mooncake master's HTTP port: whether it is alive, and what the pool holds. Moves no records.

The client's own library lists nothing, and two of its calls hold the interpreter lock for as long as they
wait for a master. Asking here first keeps a master that hangs from stopping this process.
"""

from __future__ import annotations

import errno
import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tiercel.blocks import KEY_BYTES, BlockKey
from tiercel.tiers.base import Stored

# Names asked for in one query: their replies stay small.
_BATCH = 64
_NAME_BYTES_MAX = 4096
_REPLY_BYTES_MAX = 1 << 20


class Admin:
    """`host:port` of the master's HTTP server. All of it raises `OSError` when there is no answer in time."""

    def __init__(self, host: str, port: int, deadline_s: float) -> None:
        self._host = host
        self._port = port
        self._deadline_s = deadline_s

    def check(self) -> None:
        """Return if the master is up and serving."""
        with self._get("/health") as reply:
            reply.read(_REPLY_BYTES_MAX)

    def listing(self, prefix: str) -> Iterator[Stored]:
        """Every record whose name begins with `prefix`. The time of use is not known: now.

        Grants no leases, so that a listing keeps nothing from being evicted.
        """
        now_s = time.time()
        batch: list[str] = []
        for name in self._names(prefix):
            batch.append(name)
            if len(batch) == _BATCH:
                yield from self._measured(batch, prefix, now_s)
                batch.clear()
        yield from self._measured(batch, prefix, now_s)

    def _names(self, prefix: str) -> Iterator[str]:
        with self._get("/get_all_keys") as reply:
            while line := reply.readline(_NAME_BYTES_MAX):
                name = line.decode("ascii", "replace").strip()
                if key_of(prefix, name) is not None:
                    yield name

    def _measured(self, names: list[str], prefix: str, now_s: float) -> Iterator[Stored]:
        if not names:
            return
        with self._get("/batch_query_keys?keys=" + ",".join(names)) as reply:
            body = reply.read(_REPLY_BYTES_MAX)
        try:
            found = json.loads(body)["data"]
            # A name without a finished replica is being written or was just evicted.
            sizes = {name: found[name]["values"][0]["size_"] for name in names if found[name]["values"]}
        except (ValueError, KeyError, TypeError, IndexError):
            raise OSError(errno.EIO, "the master's listing is not understood") from None
        for name, size in sizes.items():
            key = key_of(prefix, name)
            if key is not None and isinstance(size, int):
                yield Stored(key, size, now_s)

    @contextmanager
    def _get(self, path: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._deadline_s)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            if reply.status != 200:
                raise OSError(errno.EIO, f"the master answers {reply.status} to {path[:40]}")
            yield reply
        except (OSError, http.client.HTTPException) as fault:
            reason = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
            raise OSError(
                errno.EIO, f"HTTP port {self._port} of the master: {reason or type(fault).__name__}"
            ) from fault
        finally:
            connection.close()


def named(prefix: str, key: BlockKey) -> str:
    """The name of a record in the pool."""
    return prefix + key.hex()


def key_of(prefix: str, name: str) -> BlockKey | None:
    """The key that has this name; None for what is not named like a record."""
    rest = name[len(prefix) :]
    if not name.startswith(prefix) or len(rest) != 2 * KEY_BYTES or rest != rest.lower():
        return None
    try:
        return BlockKey(bytes.fromhex(rest))
    except ValueError:
        return None
