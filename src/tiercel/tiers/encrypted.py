"""Encryption at rest around any tier: what leaves through it is encrypted, what comes back is authenticated.

A record encrypted with a key we lack is a miss; one that is not what was written is CORRUPT, a plain one too
(else whoever can write to the place could plant one). A record under an older key of the ring is written
again under the first when it is read, in the background, one at a time. What it looks like at rest is
`tiercel.tiers.envelope`'s.

Owns its buffers: page-aligned, one per thread, as long as its largest batch and at most 16 MiB or one record.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Collection, Iterator, Sequence

from tiercel.blocks import BlockKey
from tiercel.tiers.base import Fate, Outcome, Stored, Tier, Usage
from tiercel.tiers.envelope import decrypt, decrypt_header, encrypt, key_id_of
from tiercel.tiers.extras import Oddments, Part, Peeks, Recycles, Shared, Tidies
from tiercel.tiers.keyring import KeyRing

_BATCH_BYTES = 16 << 20


class _Use:
    """A read that may end in a rewrite. A delete that comes between makes it end in none."""

    __slots__ = ("deleted", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.deleted = False


class Encrypted:
    """A `Tier` over another one. Build it with `encrypted`, which forwards what else the inner one offers."""

    def __init__(self, inner: Tier, keys: KeyRing) -> None:
        self._inner = inner
        self._keys = keys
        self._local = threading.local()
        self._rotates = len(keys) > 1
        self._rewriting = threading.Semaphore(1)
        # Reads and rewrites under way, by key, where keys rotate; guarded by `_lock`.
        self._uses: dict[BlockKey, set[_Use]] = {}
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._inner.name

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._inner.contains(keys)

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        uses = [self._begin(key) if self._rotates else None for key in keys]
        try:
            outcomes = self._inner.read(keys, records)
            for at, (key, record) in enumerate(zip(keys, records, strict=True)):
                if outcomes[at].fate is Fate.OK:
                    outcomes[at] = self._read(key, record, uses, at)
            return outcomes
        finally:
            for key, use in zip(keys, uses, strict=True):
                self._end(key, use)

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        pairs = list(zip(keys, records, strict=True))
        while pairs:
            batch = [pairs.pop(0)]
            total = len(batch[0][1])
            while pairs and total + len(pairs[0][1]) <= _BATCH_BYTES:
                batch.append(pairs.pop(0))
                total += len(batch[-1][1])
            outcomes += self._write(batch, self._scratch(total))
        return outcomes

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        self._no_rewrites_after(keys)
        return self._inner.delete(keys)

    def scan(self) -> Iterator[Stored]:
        return self._inner.scan()

    def usage(self) -> Usage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()

    def _read(self, key: BlockKey, record: memoryview, uses: list[_Use | None], at: int) -> Outcome:
        stale = self._rotates and key_id_of(record) != self._keys.first
        outcome = decrypt(record, key, self._keys)
        if stale and outcome.fate is Fate.OK and self._rotate(key, record, uses[at]):
            uses[at] = None
        return outcome

    def _write(self, batch: list[tuple[BlockKey, memoryview]], scratch: memoryview) -> list[Outcome]:
        made: list[memoryview | str] = []
        for _, record in batch:
            size = encrypt(record, scratch, self._keys)
            made.append(size if isinstance(size, str) else scratch[:size])
            scratch = scratch[len(record) :]
        ready = [(key, one) for (key, _), one in zip(batch, made, strict=True) if not isinstance(one, str)]
        answers = iter(self._inner.write([key for key, _ in ready], [one for _, one in ready]))
        return [Outcome(Fate.FAILED, one) if isinstance(one, str) else next(answers) for one in made]

    def _scratch(self, size_bytes: int) -> memoryview:
        held: memoryview | None = getattr(self._local, "scratch", None)
        if held is None or len(held) < size_bytes:
            held = self._local.scratch = memoryview(mmap.mmap(-1, size_bytes))
        return held[:size_bytes]

    # Rotation.

    def _no_rewrites_after(self, keys: Sequence[BlockKey]) -> None:
        for key in keys if self._rotates else ():
            with self._lock:
                uses = list(self._uses.get(key, ()))
            for use in uses:
                # Waits for a rewrite of this record under way, so that none comes after the delete.
                with use.lock:
                    use.deleted = True

    def _begin(self, key: BlockKey) -> _Use:
        use = _Use()
        with self._lock:
            self._uses.setdefault(key, set()).add(use)
        return use

    def _end(self, key: BlockKey, use: _Use | None) -> None:
        if use is None:
            return
        with self._lock:
            uses = self._uses[key]
            uses.discard(use)
            if not uses:
                del self._uses[key]

    def _rotate(self, key: BlockKey, record: memoryview, use: _Use | None) -> bool:
        """Write a record again under the first key, unless one is being rewritten. True: it took `use`."""
        if use is None or not self._rewriting.acquire(blocking=False):
            return False
        # A copy: the slot is its reader's as soon as the read is over.
        made = memoryview(mmap.mmap(-1, len(record)))
        size = encrypt(record, made, self._keys)
        if isinstance(size, str):
            self._rewriting.release()
            return False

        def rewrite() -> None:
            try:
                with use.lock:
                    if not use.deleted:
                        self._inner.write([key], [made[:size]])
            finally:
                self._end(key, use)
                self._rewriting.release()

        threading.Thread(target=rewrite, name=f"tiercel-{self.name}-rotate", daemon=True).start()
        return True


class _ForwardsShared:
    _inner: Shared

    def changes(self, afresh: bool) -> Iterator[Part]:
        return self._inner.changes(afresh)

    def dates(self, keys: Sequence[BlockKey]) -> list[float | None]:
        return self._inner.dates(keys)

    def touch(self, keys: Sequence[BlockKey], ages_s: Sequence[float]) -> list[Outcome]:
        return self._inner.touch(keys, ages_s)


class _ForwardsRecycles(Encrypted):
    _inner: Recycles  # type: ignore[assignment]  # (and a Tier)

    def recycle(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        self._no_rewrites_after(keys)
        return self._inner.recycle(keys)


class _ForwardsPeeks:
    _inner: Peeks
    _keys: KeyRing

    def peek(self, keys: Sequence[BlockKey]) -> list[bytes | Outcome]:
        pages = self._inner.peek(keys)
        return [
            decrypt_header(page, key, self._keys) if isinstance(page, bytes) else page
            for key, page in zip(keys, pages, strict=True)
        ]


class _ForwardsTidies:
    _inner: Tidies

    def oddments(self, remove: bool) -> Oddments:
        return self._inner.oddments(remove)

    def prune(self, tags: Collection[bytes]) -> None:
        self._inner.prune(tags)


def encrypted(inner: Tier, keys: KeyRing) -> Encrypted:
    """Encrypt what lies in `inner`, and offer whatever extras it offers."""
    forwards = tuple(
        forward
        for offer, forward in (
            (Shared, _ForwardsShared),
            (Recycles, _ForwardsRecycles),
            (Peeks, _ForwardsPeeks),
            (Tidies, _ForwardsTidies),
        )
        if isinstance(inner, offer)
    )
    made: Encrypted = type("Encrypted", (*forwards, Encrypted), {})(inner, keys)
    return made
