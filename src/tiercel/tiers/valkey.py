"""Records in Valkey or Redis: one server or a cluster, one string value per record under one prefix.

A value goes from its slot to the socket and from the socket into a slot, with no copy between. Each call is
over within the deadline, whatever the server or the network does, and a connection that failed is never
used again. No eviction: the server's own policy and the time to live do that. Names: <prefix><key, 64 hex>.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial

from tiercel.blocks import PAGE_BYTES, BlockKey
from tiercel.blocks.record import HEADER_BYTES
from tiercel.errors import TierError
from tiercel.tiers.base import MISSING, OK, Fate, Outcome, Stored, Tier, Usage
from tiercel.tiers.url import TierUrl
from tiercel.tiers.valkey_listing import BATCH, FIRST_PAGE, call_all, named, page, reason, room
from tiercel.tiers.valkey_nodes import Nodes
from tiercel.tiers.valkey_pool import Address, Login, LoginError, NodePaused
from tiercel.tiers.valkey_url import ValkeyOptions, read_url
from tiercel.tiers.valkey_wire import Connection, ProtocolError, Refusal, Reply

_CLOSED = Outcome(Fate.FAILED, "closed")
# The server takes no writes, or not this one; reading goes on.
_NO_ROOM = {
    "OOM": "the server's memory is full",
    "MISCONF": "the server stopped taking writes, for it cannot save to its disk",
    "NOREPLICAS": "the server stopped taking writes, for it has too few replicas",
}


def open_valkey(url: TierUrl, *, name: str, deadline_s: float, slot_bytes: int) -> Tier:
    """Open the tier that `url` describes (see `valkey_url`). A server that is not there now may come later.

    Raises `TierError`, one line, for a URL, login or size of records that its operator has to mend.
    """
    address, login, options = read_url(url)
    tier = ValkeyTier(address, login, options, name=name, deadline_s=deadline_s)
    try:
        limit_bytes = tier.record_bytes_max()
    except LoginError as fault:
        tier.close()
        raise TierError(f"{url}: {fault}") from None
    except OSError:
        # Every call says so again, until it is there.
        return tier
    if slot_bytes > limit_bytes:
        tier.close()
        raise TierError(f"{url}: {_too_long(slot_bytes, limit_bytes)}")
    return tier


class ValkeyTier:
    """A Valkey server or cluster. Opens no connection before the first call."""

    def __init__(
        self,
        address: Address,
        login: Login,
        options: ValkeyOptions = ValkeyOptions(),  # noqa: B008 (frozen)
        *,
        name: str = "valkey",
        deadline_s: float = 5.0,
    ) -> None:
        self._name = name
        self._deadline_s = deadline_s
        self._prefix = options.prefix.encode()
        self._expiring = options.ttl_s is not None
        ttl = [] if options.ttl_s is None else [b"EX", b"%d" % options.ttl_s]
        self._read_head, self._read_tail = [b"GET"], list[bytes]()
        if ttl and options.refresh:
            self._read_head, self._read_tail = [b"GETEX"], ttl
        self._write_tail = ttl
        self._nodes = Nodes(address, login)
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    def record_bytes_max(self) -> int:
        """What the server takes as one record. Raises `OSError`, `LoginError` where it does not let us in."""
        until_s = self._until_s()
        (address, *_) = self._nodes.primaries(until_s)
        return self._nodes.at(address, until_s, lambda connection: connection.value_bytes_max)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each record is there; of a cluster's node that is down, no. Raises `OSError` otherwise."""
        if self._closed:
            return [False] * len(keys)
        answers = self._each(keys, b"EXISTS")
        for answer in answers:
            if isinstance(answer, OSError) and not self._down_in_cluster(answer):
                raise answer
            if isinstance(answer, Refusal):
                raise OSError(errno.EIO, reason(answer))
        return [answer == 1 for answer in answers]

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        """Fill each buffer, one after another: who wants several at a time calls on several threads."""
        return self._one_by_one(self._read, keys, records)

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return self._one_by_one(self._write, keys, records)

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        if self._closed:
            return [_CLOSED] * len(keys)
        return [_deleted(answer) for answer in self._each(keys, b"UNLINK")]

    def peek(self, keys: Sequence[BlockKey]) -> list[bytes | Outcome]:
        """The first 4 KiB of each record, or why not. Counts as a use on a server that evicts by use."""
        if self._closed:
            return [_CLOSED] * len(keys)
        return [_peeked(answer) for answer in self._each(keys, b"GETRANGE", b"0", b"%d" % (HEADER_BYTES - 1))]

    def scan(self) -> Iterator[Stored]:
        """Every record, page by page, without touching what the server thinks was used last."""
        if self._closed:
            raise OSError(errno.EBADF, "closed")
        seen: set[BlockKey] = set()
        for address in self._nodes.primaries(self._until_s()):
            cursor = FIRST_PAGE
            while True:
                act = partial(page, prefix=self._prefix, cursor=cursor)
                cursor, found = self._nodes.at(address, self._until_s(), act)
                for stored in found:
                    if stored.key not in seen:
                        seen.add(stored.key)
                        yield stored
                if cursor == FIRST_PAGE:
                    break

    def usage(self) -> Usage:
        """Free room below `maxmemory`, summed over the nodes; nothing where the server evicts by itself."""
        until_s = self._until_s()
        try:
            rooms = [
                self._nodes.at(address, until_s, lambda connection: room(connection, self._expiring))
                for address in self._nodes.primaries(until_s)
            ]
        except OSError:
            return Usage()
        return Usage(_sum([one.free_bytes for one in rooms]), _sum([one.total_bytes for one in rooms]))

    def close(self) -> None:
        self._closed = True
        self._nodes.close()

    # One key.

    def _one_by_one(
        self,
        act: Callable[[BlockKey, memoryview, float], Outcome],
        keys: Sequence[BlockKey],
        records: Sequence[memoryview],
    ) -> list[Outcome]:
        until_s = self._until_s()
        pairs = list(zip(keys, records, strict=True))
        return [
            act(*pair, self._shared(until_s, left))
            for left, pair in zip(_countdown(pairs), pairs, strict=True)
        ]

    def _read(self, key: BlockKey, record: memoryview, until_s: float) -> Outcome:
        name = named(self._prefix, key)

        def get(connection: Connection) -> Outcome | Refusal:
            connection.send([*self._read_head, name, *self._read_tail])
            value_bytes = connection.value_bytes(len(record))
            if isinstance(value_bytes, Refusal):
                return value_bytes
            if value_bytes is None:
                return MISSING
            if value_bytes < HEADER_BYTES or value_bytes % PAGE_BYTES or value_bytes > len(record):
                # Closing is cheaper than taking what nobody wants, and bounded whatever its length is.
                connection.close()
                return Outcome(Fate.CORRUPT, f"value has {value_bytes} bytes")
            connection.value_into(record[:value_bytes])
            return OK

        outcome = self._outcome(name, until_s, get)
        # A node of a cluster that is known to be down is no news of the tier: its keys are misses.
        return outcome if outcome is not None else Outcome(Fate.MISSING, "its node is down")

    def _write(self, key: BlockKey, record: memoryview, until_s: float) -> Outcome:
        name = named(self._prefix, key)

        def put(connection: Connection) -> Outcome | Refusal:
            if len(record) > connection.value_bytes_max:
                return Outcome(Fate.FULL, _too_long(len(record), connection.value_bytes_max))
            connection.send_value([b"SET", name], record, self._write_tail)
            reply = connection.reply()
            if isinstance(reply, Refusal):
                return reply
            if reply != b"OK":
                raise ProtocolError("not an answer to SET")
            return OK

        outcome = self._outcome(name, until_s, put)
        return outcome if outcome is not None else Outcome(Fate.FAILED, "its node is down")

    def _outcome(
        self, name: bytes, until_s: float, act: Callable[[Connection], Outcome | Refusal]
    ) -> Outcome | None:
        """What became of one key; None: it belongs to a node of a cluster that is known to be down."""
        if self._closed:
            return _CLOSED
        try:
            answer = self._nodes.follow(name, until_s, act)
        except OSError as fault:
            return None if self._down_in_cluster(fault) else self._failed(fault)
        return _refused(answer) if isinstance(answer, Refusal) else answer

    # Many keys.

    def _each(self, keys: Sequence[BlockKey], verb: bytes, *after: bytes) -> list[Reply | OSError]:
        """The reply to `verb` for each key, asked of all its nodes in as few round trips as they need."""
        until_s = self._until_s()
        names = [named(self._prefix, key) for key in keys]
        answers: list[Reply | OSError] = [None] * len(names)
        groups: dict[Address, list[int]] = {}
        for index, name in enumerate(names):
            try:
                groups.setdefault(self._nodes.owner(name, until_s), []).append(index)
            except OSError as fault:
                answers[index] = fault
        for left, (address, group) in zip(_countdown(groups), groups.items(), strict=True):
            group_until_s = self._shared(until_s, left)
            for start in range(0, len(group), BATCH):
                part = group[start : start + BATCH]
                act = partial(call_all, commands=[(verb, names[index], *after) for index in part])
                replies: Sequence[Reply | OSError]
                try:
                    replies = self._nodes.at(address, group_until_s, act)
                except OSError as fault:
                    replies = [fault] * len(part)
                for index, reply in zip(part, replies, strict=True):
                    answers[index] = self._redirected((verb, names[index], *after), reply, until_s)
        return answers

    def _redirected(
        self, command: tuple[bytes, ...], reply: Reply | OSError, until_s: float
    ) -> Reply | OSError:
        """The reply, or where it sends us elsewhere, the reply from there."""
        if not isinstance(reply, Refusal):
            return reply
        try:
            return self._nodes.follow(
                command[1], until_s, lambda connection: connection.call(*command), reply
            )
        except OSError as fault:
            return fault

    # Small things.

    def _until_s(self) -> float:
        return time.monotonic() + self._deadline_s

    def _shared(self, until_s: float, left: int) -> float:
        """When to give up one of several waits: half of the time, where other nodes may answer the rest."""
        if left == 0 or not self._nodes.clustered:
            return until_s
        now_s = time.monotonic()
        return now_s + (until_s - now_s) / 2

    def _down_in_cluster(self, fault: OSError) -> bool:
        return isinstance(fault, NodePaused) and self._nodes.clustered

    def _failed(self, fault: OSError) -> Outcome:
        return _CLOSED if self._closed else Outcome(Fate.FAILED, fault_text(fault))


def _countdown(things: Sized) -> range:
    """How many come after each of them."""
    return range(len(things) - 1, -1, -1)


def fault_text(fault: OSError) -> str:
    """A fault of the connection in a few words."""
    return (fault.strerror or str(fault) or type(fault).__name__)[:120]


def _deleted(answer: Reply | OSError) -> Outcome:
    if isinstance(answer, OSError):
        return Outcome(Fate.FAILED, fault_text(answer))
    if isinstance(answer, Refusal):
        return _refused(answer)
    return OK if answer == 1 else MISSING


def _peeked(answer: Reply | OSError) -> bytes | Outcome:
    if isinstance(answer, OSError):
        return Outcome(Fate.FAILED, fault_text(answer))
    if isinstance(answer, Refusal):
        return _refused(answer)
    # An empty answer is how a name that is not there shows.
    return answer if isinstance(answer, bytes) and answer else MISSING


def _refused(refusal: Refusal) -> Outcome:
    if refusal.code in _NO_ROOM:
        return Outcome(Fate.FULL, _NO_ROOM[refusal.code])
    fate = Fate.CORRUPT if refusal.code == "WRONGTYPE" else Fate.FAILED
    return Outcome(fate, reason(refusal))


def _too_long(record_bytes: int, limit_bytes: int) -> str:
    return (
        f"a record of {record_bytes} bytes, where the server takes {limit_bytes} at most (proto-max-bulk-len)"
    )


def _sum(parts: list[int | None]) -> int | None:
    """The sum, if every part is known and there is one."""
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None
