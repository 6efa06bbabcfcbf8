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
from collections.abc import Sequence
from typing import Any

from tiercel.blocks import BlockKey
from tiercel.tiers.around import Around, ForwardsPeeks, ForwardsRecycles, offering
from tiercel.tiers.base import Fate, Outcome, Tier
from tiercel.tiers.envelope import decrypt, decrypt_header, encrypt, key_id_of
from tiercel.tiers.keyring import KeyRing

_BATCH_BYTES = 16 << 20


class _Use:
    """A read that may end in a rewrite. A delete that comes between makes it end in none."""

    __slots__ = ("deleted", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.deleted = False


class Encrypted(Around):
    """A `Tier` over another one. Build it with `encrypted`, which forwards what else the inner one offers."""

    def __init__(self, inner: Tier, keys: KeyRing) -> None:
        super().__init__(inner)
        self._keys = keys
        self._rotates = len(keys) > 1
        self._rewriting = threading.Semaphore(1)
        # Reads and rewrites under way, by key, where keys rotate; guarded by `_lock`.
        self._uses: dict[BlockKey, set[_Use]] = {}
        self._lock = threading.Lock()

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        uses = [self._begin(key) if self._rotates else None for key in keys]
        try:
            outcomes = self.inner.read(keys, records)
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
        return self.inner.delete(keys)

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
        answers = iter(self.inner.write([key for key, _ in ready], [one for _, one in ready]))
        return [Outcome(Fate.FAILED, one) if isinstance(one, str) else next(answers) for one in made]

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
                        self.inner.write([key], [made[:size]])
            finally:
                self._end(key, use)
                self._rewriting.release()

        threading.Thread(target=rewrite, name=f"tiercel-{self.name}-rotate", daemon=True).start()
        return True


class _Recycles(ForwardsRecycles, Encrypted):
    inner: Any

    def recycle(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        self._no_rewrites_after(keys)
        return super().recycle(keys)


class _Peeks(ForwardsPeeks):
    _keys: KeyRing

    def peek(self, keys: Sequence[BlockKey]) -> list[bytes | Outcome]:
        return [
            decrypt_header(page, key, self._keys) if isinstance(page, bytes) else page
            for key, page in zip(keys, super().peek(keys), strict=True)
        ]


def encrypted(inner: Tier, keys: KeyRing) -> Encrypted:
    """Encrypt what lies in `inner`, and offer whatever extras it offers."""
    made: Encrypted = offering(Encrypted, inner, _Recycles, _Peeks)(inner, keys)
    return made
