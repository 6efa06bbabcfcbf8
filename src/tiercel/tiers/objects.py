"""Records as objects in a bucket: S3 and what speaks it, Google Cloud Storage, Azure Blob, through obstore.

    <prefix>/tiercel-1/<scope tag, 16 hex>/<2 hex>/<46 hex>.kv   one record

An object appears whole or not at all, so nothing here can be seen half written. Large records move in
parts, several at once. Nothing but `scan` ever lists. No index, no eviction, no expiry: a lifecycle rule of
the bucket does that, and an object that is gone is a miss. Every call ends within its deadline.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.store import ObjectStore

from tiercel.blocks import PAGE_BYTES, TAG_BYTES, BlockKey
from tiercel.blocks.record import HEADER_BYTES
from tiercel.errors import TierError, TierUnreachable
from tiercel.tiers.base import MISSING, OK, Fate, Outcome, Stored, Usage
from tiercel.tiers.objects_calls import CLOSED, Calls
from tiercel.tiers.objects_faults import FAULTS, RANGE_STATUS, Fault, fault_of, is_whole_instead
from tiercel.tiers.objects_place import place_of
from tiercel.tiers.url import TierUrl

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

T = TypeVar("T")

FORMAT = "tiercel-1"
# One connection to a large object store gives some 50 to 100 MB/s: more than this is asked for in parts.
PART_BYTES = 8 << 20
_MULTIPART_OVER_BYTES = 32 << 20
_PARTS_MAX = 8
_NOBODYS = "nothing"
_CHUNK_BYTES = 256 << 10
_NAME = re.compile(r"([0-9a-f]{16})/([0-9a-f]{2})/([0-9a-f]{46})\.kv")
# S3 deletes a thousand at a time but does not tell what was there; so many are worth asking before.
_ASK_FIRST_MAX = 32
_PAGE = 1000
_ANY_ROOM = 1 << 62
_LIST_TRIES = 5
_LIST_AGAIN_S = 0.2
_ODD_NAME = "; a name there may have an empty or dotted step"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a record to be read: which key of the call, from which byte, into what."""

    at: int
    start: int
    into: memoryview
    room_bytes: int


@dataclass(frozen=True, slots=True)
class _Got:
    """What reading a range gave. `version` tells whether two ranges are of one object."""

    outcome: Outcome
    object_bytes: int = 0
    version: str | None = None


_PAST = _Got(OK)
_ANEW = Outcome(Fate.FAILED, "changed while it was read")


def open_objects(url: TierUrl, *, name: str, deadline_s: float, slot_bytes: int) -> ObjectsTier:
    """The tier at `url` (see `tiercel.tiers.objects_place`), once the place has answered.

    Raises `TierError` for what its operator has to mend: the URL, the credentials, a bucket that is not
    there; `TierUnreachable` when it does not answer within the deadline. `slot_bytes` is not needed: the
    buffers of each call say how much a record may have.
    """
    tier = ObjectsTier.at(url, name=name, deadline_s=deadline_s)
    fault = tier.silence()
    if fault is None:
        return tier
    tier.close()
    if fault.mend:
        raise TierError(f"{url}: {fault.outcome.reason}")
    raise TierUnreachable(f"{url} does not answer: {fault.outcome.reason}")


class ObjectsTier:
    """A bucket, or a prefix of one. `tells_missing`: a deletion says so of what was not there; `bulk`: how
    many records one request deletes.
    """

    def __init__(
        self, calls: Calls, *, name: str, prefix: str = "", tells_missing: bool = False, bulk: int = 1
    ) -> None:
        self._calls = calls
        self._name = name
        self._root = f"{prefix}/{FORMAT}" if prefix else FORMAT
        self._tells_missing = tells_missing
        self._bulk = bulk
        # Given up for good with a server that answers a request for a range with the whole object.
        self._ranges = True

    @classmethod
    def at(cls, url: TierUrl, *, name: str, deadline_s: float) -> ObjectsTier:
        """The tier at `url`, without asking the place. Raises `TierError` for a URL that is not accepted."""
        place = place_of(url)
        calls = Calls(place.client, deadline_s, place.concurrency)
        return cls(calls, name=name, prefix=place.prefix, tells_missing=place.tells_missing, bulk=place.bulk)

    @property
    def name(self) -> str:
        return self._name

    @property
    def calls(self) -> Calls:
        """How requests are made: their deadline and their pace."""
        return self._calls

    def path(self, key: BlockKey) -> str:
        """The name of the record of `key` in the bucket."""
        tag, fan, rest = key[:TAG_BYTES], key[TAG_BYTES : TAG_BYTES + 1], key[TAG_BYTES + 1 :]
        return f"{self._root}/{tag.hex()}/{fan.hex()}/{rest.hex()}.kv"

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """One HEAD for each key, several at once. Raises `OSError` when none of them could be asked."""
        if self._calls.closed:
            return [False] * len(keys)
        heads = self._each(keys, lambda at, until_s: self._head(keys[at], until_s))
        failed = [head for head in heads if head.fate is Fate.FAILED]
        if failed and len(failed) == len(keys):
            raise OSError(failed[0].reason)
        return [head is OK for head in heads]

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        until_s = self._calls.until_s()
        outcomes = self._read(keys, records, until_s)
        for at, outcome in enumerate(outcomes):
            if outcome is _ANEW:
                outcomes[at] = self._read([keys[at]], [records[at]], until_s)[0]
        return outcomes

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        pairs = list(zip(keys, records, strict=True))
        return self._each(keys, lambda at, until_s: self._write(*pairs[at], until_s))

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """One that is not there is MISSING; of a large batch some places do not tell, and it is OK."""
        if not self._tells_missing and len(keys) <= _ASK_FIRST_MAX:
            return self._each(keys, lambda at, until_s: self._delete_if_there(keys[at], until_s))
        batches = [keys[start : start + self._bulk] for start in range(0, len(keys), self._bulk)]
        answers = self._each(batches, lambda at, until_s: self._delete(batches[at], until_s))
        return [outcome for batch in answers for outcome in batch]

    def peek(self, keys: Sequence[BlockKey]) -> list[bytes | Outcome]:
        """The header of each record, or why not."""
        return self._each(keys, lambda at, until_s: self._peek(keys[at], until_s))

    def scan(self) -> Iterator[Stored]:
        """Every record, by a listing of names; other objects are passed over. Raises `OSError`."""
        last: str | None = None
        tries, until_s = 0, self._calls.until_s()
        while True:
            if self._calls.closed:
                raise OSError(CLOSED.reason)
            try:
                for path, stored in self._list(last):
                    if stored is not None:
                        yield stored
                    # A listing may take long, but not without getting on.
                    last, tries, until_s = path, 0, self._calls.until_s()
                return
            except FAULTS as error:
                fault = fault_of(error)
                tries += 1
                if not fault.again or tries >= _LIST_TRIES or time.monotonic() > until_s - _LIST_AGAIN_S:
                    odd = "" if fault.again or fault.status else _ODD_NAME
                    raise OSError(f"listing: {fault.outcome.reason}{odd}") from None
                self._calls.rest(tries, fault, until_s)

    def silence(self) -> Fault | None:
        """Why the place gives no answers, or None where it does. Asks for an object that nobody has."""

        def ask(client: ObjectStore) -> Fault | None:
            obstore.get(client, f"{self._root}/{_NOBODYS}")
            return None

        def failed(fault: Fault) -> Fault | None:
            return None if fault.outcome is MISSING else fault

        return self._calls.attempt(ask, self._calls.until_s(), failed)

    def usage(self) -> Usage:
        """A bucket does not say."""
        return Usage()

    def close(self) -> None:
        self._calls.close()

    def _each(self, items: Sequence[object], act: Callable[[int, float], T]) -> list[T]:
        """`act` on the number of each item, several at once, all within one deadline."""
        until_s = self._calls.until_s()
        return self._calls.spread(lambda at: act(at, until_s), len(items))

    def _head(self, key: BlockKey, until_s: float) -> Outcome:
        def ask(client: ObjectStore) -> Outcome:
            obstore.head(client, self.path(key))
            return OK

        return self._calls.attempt(ask, until_s, _outcome)

    def _read(self, keys: Sequence[BlockKey], records: Sequence[memoryview], until_s: float) -> list[Outcome]:
        pieces = []
        for at, (_, record) in enumerate(zip(keys, records, strict=True)):
            part = PART_BYTES if self._ranges else max(1, len(record))
            for start in range(0, len(record), part):
                pieces.append(_Piece(at, start, record[start : start + part], len(record)))
        answers = self._calls.spread(
            lambda n: self._fetch(keys[pieces[n].at], pieces[n], until_s), len(pieces)
        )
        got: list[list[_Got]] = [[] for _ in keys]
        for piece, answer in zip(pieces, answers, strict=True):
            got[piece.at].append(answer)
        return [_joined(ranges) for ranges in got]

    def _fetch(self, key: BlockKey, piece: _Piece, until_s: float) -> _Got:
        def get(client: ObjectStore) -> _Got:
            return self._get(client, self.path(key), piece)

        return self._calls.attempt(get, until_s, lambda fault: _missed(piece, fault))

    def _get(self, client: ObjectStore, path: str, piece: _Piece) -> _Got:
        # A plain read of what fits in one part: some servers take longer for a range.
        whole = piece.room_bytes == len(piece.into) or not self._ranges
        asked: GetOptions = {} if whole else {"range": (piece.start, piece.start + len(piece.into))}
        try:
            answer = obstore.get(client, path, options=asked)
        except FAULTS as error:
            if whole or not is_whole_instead(error):
                raise
            self._ranges = False
            return _Got(_ANEW)
        size, version = answer.meta["size"], answer.meta["e_tag"]
        if size < HEADER_BYTES or size % PAGE_BYTES or size > piece.room_bytes:
            # Said before a byte of it is read, and the connection dropped.
            return _Got(Outcome(Fate.CORRUPT, f"object has {size} bytes"))
        expected = min(size - piece.start, len(piece.into))
        done = 0
        for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
            if self._calls.closed:
                return _Got(CLOSED)
            taken = chunk[: expected - done]
            piece.into[done : done + len(taken)] = taken
            done += len(taken)
            if done == expected:
                return _Got(OK, size, version)
        return _Got(Outcome(Fate.CORRUPT, f"object ends at {piece.start + done} of {size} bytes"))

    def _write(self, key: BlockKey, record: memoryview, until_s: float) -> Outcome:
        multipart = len(record) > _MULTIPART_OVER_BYTES
        chunk_bytes = max(PART_BYTES, -(-len(record) // _PARTS_MAX)) if multipart else len(record)

        def put(client: ObjectStore) -> Outcome:
            obstore.put(
                client,
                self.path(key),
                record,
                use_multipart=multipart,
                chunk_size=chunk_bytes,
                max_concurrency=_PARTS_MAX,
            )
            return OK

        # In parts: begin, all parts at once, end; or call it off.
        return self._calls.attempt(put, until_s, _outcome, steps=4 if multipart else 1)

    def _delete_if_there(self, key: BlockKey, until_s: float) -> Outcome:
        there = self._head(key, until_s)
        return self._delete([key], until_s)[0] if there is OK else there

    def _delete(self, keys: Sequence[BlockKey], until_s: float) -> list[Outcome]:
        paths = [self.path(key) for key in keys]

        def delete(client: ObjectStore) -> list[Outcome]:
            obstore.delete(client, paths)
            return [OK] * len(paths)

        return self._calls.attempt(delete, until_s, lambda fault: [fault.outcome] * len(paths))

    def _peek(self, key: BlockKey, until_s: float) -> bytes | Outcome:
        head = bytearray(HEADER_BYTES)
        piece = _Piece(0, 0, memoryview(head), _ANY_ROOM)
        outcome = _ANEW
        while outcome is _ANEW:
            outcome = self._fetch(key, piece, until_s).outcome
        return bytes(head) if outcome is OK else outcome

    def _list(self, after: str | None) -> Iterator[tuple[str, Stored | None]]:
        for page in obstore.list(self._calls.patient, self._root, offset=after, chunk_size=_PAGE):
            for meta in page:
                if self._calls.closed:
                    raise OSError(CLOSED.reason)
                yield meta["path"], self._stored(meta)

    def _stored(self, meta: ObjectMeta) -> Stored | None:
        named = _NAME.fullmatch(meta["path"].removeprefix(self._root + "/"))
        if named is None:
            return None
        key = BlockKey(bytes.fromhex("".join(named.groups())))
        return Stored(key, meta["size"], meta["last_modified"].timestamp())


def _outcome(fault: Fault) -> Outcome:
    return fault.outcome


def _missed(piece: _Piece, fault: Fault) -> _Got:
    """What a range that did not come means: beyond the object's end is not a fault."""
    if fault.status != RANGE_STATUS:
        return _Got(fault.outcome)
    return _PAST if piece.start else _Got(Outcome(Fate.CORRUPT, "object is empty"))


def _joined(ranges: Sequence[_Got]) -> Outcome:
    """One record from its ranges: all came, and all of one object."""
    bad = next((got.outcome for got in ranges if got.outcome is not OK), None)
    if bad is not None:
        return bad
    inside = [got for got in ranges if got is not _PAST]
    if len({(got.object_bytes, got.version) for got in inside}) > 1:
        return _ANEW
    return OK
