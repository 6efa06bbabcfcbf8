"""Records in a Mooncake Store pool: memory of many hosts behind one master, moved by Mooncake's own client.

A record goes from its slot to the socket and back with no copy of ours between. One that is there already
is not sent again: replacing shows a mixture to whoever reads it just then (its checksum tells), so that is
done for other content only. No eviction: the pool does that. Names: <prefix><key, 64 hex>.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tiercel.blocks import PAGE_BYTES, BlockKey
from tiercel.blocks.record import HEADER_BYTES, parse
from tiercel.errors import TierUnreachable
from tiercel.tiers.base import MISSING, OK, Fate, Outcome, Stored, Tier, Usage
from tiercel.tiers.mooncake_admin import named
from tiercel.tiers.mooncake_client import Client
from tiercel.tiers.mooncake_url import read_url
from tiercel.tiers.url import TierUrl

_NO_ROOM, _BAD_SIZE, _UNFINISHED, _NOT_THERE = -200, -600, -703, -704
_REASONS = {
    _NO_ROOM: "the pool has no room",
    _BAD_SIZE: "the client refuses the buffer",
    _UNFINISHED: "the record is being written",
    -705: "the record exists",
    -706: "the record is leased",
    -707: "the lease ended before the transfer",
    -800: "the transfer failed: whoever holds the memory does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}


def open_mooncake(url: TierUrl, *, name: str, deadline_s: float, slot_bytes: int) -> Tier:
    """Open the tier that `url` describes (see `mooncake_url`).

    Raises `TierUnreachable` when the master does not answer within the deadline, `TierError` for what its
    operator has to mend. The waits of the native client are limited per process: the first tier's count.
    """
    options = read_url(url)
    try:
        client = Client(options, deadline_s)
    except OSError as fault:
        raise TierUnreachable(f"{url} does not answer: {fault.strerror or fault}{_hint(fault)}") from None
    return MooncakeTier(client, name=name)


class MooncakeTier:
    """A pool, through one connected client. Each call ends within the client's own limits.

    The client writes into a caller's buffer only until its call returns, also when it gives up: measured,
    and the reason why no call is ever abandoned half way.
    """

    def __init__(self, client: Client, *, name: str = "mooncake") -> None:
        self._client = client
        self._name = name
        self._prefix = client.options.prefix
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each is there, which keeps it there for a while. Raises `OSError` if the pool is down."""
        if self._closed or not keys:
            return [False] * len(keys)
        codes = self._client.exist(self._named(keys))
        for code in codes:
            if code < 0:
                raise OSError(errno.EIO, _reason(code))
        return [code == 1 for code in codes]

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        if self._closed or not keys:
            return [_CLOSED] * len(keys)
        names = self._named(keys)
        try:
            codes = self._client.get_into(names, list(records))
            return [self._read(*one) for one in zip(names, codes, records, strict=True)]
        except OSError as fault:
            return [Outcome(Fate.FAILED, fault.strerror or str(fault))] * len(keys)

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        if self._closed or not keys:
            return [_CLOSED] * len(keys)
        try:
            return self._write(self._named(keys), list(records))
        except OSError as fault:
            return [Outcome(Fate.FAILED, fault.strerror or str(fault))] * len(keys)

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Remove records at once; a reader of one just then may get a mixture, which its checksum tells."""
        if self._closed or not keys:
            return [_CLOSED] * len(keys)
        try:
            codes = self._client.remove(self._named(keys))
        except OSError as fault:
            return [Outcome(Fate.FAILED, fault.strerror or str(fault))] * len(keys)
        return [_removed(code) for code in codes]

    def scan(self) -> Iterator[Stored]:
        """Every record under the prefix, by the master's HTTP port; nothing when the URL says `admin=no`."""
        if self._closed:
            raise OSError(errno.EBADF, "closed")
        if self._client.admin is not None:
            yield from self._client.admin.listing(self._prefix)

    def usage(self) -> Usage:
        """Nothing: a pool that evicts is always full and always has room."""
        return Usage()

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def _named(self, keys: Sequence[BlockKey]) -> list[str]:
        return [named(self._prefix, key) for key in keys]

    def _write(self, names: list[str], records: list[memoryview]) -> list[Outcome]:
        there = self._client.exist(names)
        fresh = [at for at, code in enumerate(there) if code == 0]
        other = [at for at, code in enumerate(there) if code == 1 and not self._same(names[at], records[at])]
        codes = [min(0, code) for code in there]
        for send, chosen in ((self._client.put_from, fresh), (self._client.upsert_from, other)):
            if chosen:
                sent = send([names[at] for at in chosen], [records[at] for at in chosen])
                for at, code in zip(chosen, sent, strict=True):
                    codes[at] = code
        return [_written(code) for code in codes]

    def _same(self, name: str, record: memoryview) -> bool:
        """Whether the pool has this content already, by header and length, whenever it was sealed."""
        start = memoryview(bytearray(HEADER_BYTES))
        if self._client.get_start(name, start) != HEADER_BYTES:
            return False
        theirs, ours = parse(start), parse(record)
        if isinstance(theirs, str) or isinstance(ours, str):
            return False
        same = replace(theirs, sealed_ns=ours.sealed_ns) == ours
        return same and self._client.size_of(name) == len(record)

    def _read(self, name: str, code: int, record: memoryview) -> Outcome:
        if code in (_NOT_THERE, _UNFINISHED):
            return MISSING
        if code == _BAD_SIZE and (size := self._client.size_of(name)) > len(record):
            return Outcome(Fate.CORRUPT, f"record has {size} bytes")
        if code < 0:
            return Outcome(Fate.FAILED, _reason(code))
        if code < HEADER_BYTES or code % PAGE_BYTES:
            return Outcome(Fate.CORRUPT, f"record has {code} bytes")
        return OK


_CLOSED = Outcome(Fate.FAILED, "closed")


def _written(code: int) -> Outcome:
    if code == 0:
        return OK
    return Outcome(Fate.FULL if code == _NO_ROOM else Fate.FAILED, _reason(code))


def _removed(code: int) -> Outcome:
    if code == 0:
        return OK
    return MISSING if code == _NOT_THERE else Outcome(Fate.FAILED, _reason(code))


def _reason(code: int) -> str:
    return _REASONS.get(code, f"the client answers {code}")


def _hint(fault: OSError) -> str:
    """What to do about a master that has no HTTP port where we look."""
    return "; admin=PORT names it, admin=no does without" if "HTTP port" in str(fault) else ""
