"""What a Valkey node says about what it holds: pages of names with sizes and times, and its free room.

Moves no records and knows no clusters.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Sequence

from tiercel.blocks import KEY_BYTES, BlockKey
from tiercel.tiers.base import Stored, Usage
from tiercel.tiers.valkey_wire import Connection, ProtocolError, Refusal, Reply

# Small commands that share one round trip; their replies fit any socket buffer, so that neither side waits.
BATCH = 256
FIRST_PAGE = b"0"
_KEY = re.compile(b"[0-9a-f]{%d}" % (2 * KEY_BYTES))
_REASON_CHARS_MAX = 120


def named(prefix: bytes, key: BlockKey) -> bytes:
    """The name of a record on the server."""
    return prefix + key.hex().encode()


def key_of(prefix: bytes, name: bytes) -> BlockKey | None:
    """The key that has this name; None for what is not named like a record."""
    rest = name[len(prefix) :]
    if not name.startswith(prefix) or not _KEY.fullmatch(rest):
        return None
    return BlockKey(bytes.fromhex(rest.decode()))


def reason(refusal: Refusal) -> str:
    """An error of the server in one short printable line."""
    text = "".join(char if char.isprintable() else "?" for char in str(refusal))
    return f"the server says: {text[:_REASON_CHARS_MAX]}"


def call_all(connection: Connection, commands: Sequence[Sequence[bytes]]) -> list[Reply]:
    """Several small commands in one round trip."""
    connection.send(*commands)
    return [connection.reply() for _ in commands]


def page(connection: Connection, prefix: bytes, cursor: bytes) -> tuple[bytes, list[Stored]]:
    """One step of a listing: where the next begins (`FIRST_PAGE` again: that was all), and what was found.

    Leaves alone what the server thinks was used last. Raises `OSError` when the server refuses.
    """
    match connection.call(
        b"SCAN", cursor, b"MATCH", prefix + b"*", b"COUNT", b"%d" % BATCH, b"TYPE", b"string"
    ):
        case [bytes(following), [*names]]:
            keys = {name: key for name in names if isinstance(name, bytes) and (key := key_of(prefix, name))}
        case Refusal() as refused:
            raise OSError(errno.EIO, reason(refused))
        case _:
            raise ProtocolError("not a page of names")
    return following, _measured(connection, keys) if keys else []


def room(connection: Connection, expiring: bool) -> Usage:
    """Free bytes below `maxmemory`; None where the server evicts, for that is always full and has room."""
    info = connection.call(b"INFO", b"memory")
    lines = info.decode("ascii", "replace").split() if isinstance(info, bytes) else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    total, used = fields.get("maxmemory", ""), fields.get("used_memory", "")
    if not (total.isdigit() and used.isdigit() and int(total)):
        return Usage()
    policy = fields.get("maxmemory_policy", "")
    evicts = policy.startswith("allkeys") or (policy.startswith("volatile") and expiring)
    return Usage(None if evicts else max(0, int(total) - int(used)), int(total))


def _measured(connection: Connection, keys: dict[bytes, BlockKey]) -> list[Stored]:
    commands: list[tuple[bytes, ...]] = [(b"CLIENT", b"NO-TOUCH", b"ON")]
    for name in keys:
        commands += [(b"OBJECT", b"IDLETIME", name), (b"STRLEN", name)]
    replies = call_all(connection, [*commands, (b"CLIENT", b"NO-TOUCH", b"OFF")])[1:-1]
    now_s = time.time()
    found = []
    for key, idle_s, size in zip(keys.values(), replies[::2], replies[1::2], strict=True):
        if isinstance(size, Refusal):
            raise OSError(errno.EIO, reason(size))
        # One that went meanwhile has no length. A server that evicts by frequency keeps no times.
        if isinstance(size, int) and size > 0:
            found.append(Stored(key, size, now_s - idle_s if isinstance(idle_s, int) else now_s))
    return found
