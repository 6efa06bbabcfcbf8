"""Digests of LoRA adapters by content: two adapters of one name, or one renamed, never share or lose blocks.

Reads files, so never on the scheduler's thread. An adapter that cannot be read has no digest: its requests
bypass the store.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger("tiercel")
_KEPT = 4096


def adapter_digest(folder: Path) -> bytes | None:
    """32 bytes over the names and contents of an adapter's files; None when there is nothing to read."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if not files:
            return None
        whole = blake2b(digest_size=32, person=b"tiercel-adapter")
        for path in files:
            one = blake2b(digest_size=32)
            with path.open("rb", buffering=0) as file:
                while data := file.read(1 << 20):
                    one.update(data)
            name = path.name.encode("utf-8", "surrogateescape")
            whole.update(len(name).to_bytes(4, "little") + name + one.digest())
    except OSError:
        return None
    return whole.digest()


class Adapters:
    """Digests by vLLM's adapter id and path. Belongs to one thread.

    An adapter is read once: vLLM keeps the weights it loaded under an id, whatever happens to the files.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], bytes | None] = {}

    def digest(self, number: int, path: str) -> bytes | None:
        """The digest of an adapter; None if it cannot be told."""
        at = (number, path)
        if at not in self._digests:
            if len(self._digests) >= _KEPT:
                self._digests.pop(next(iter(self._digests)))
            self._digests[at] = adapter_digest(Path(path))
            if self._digests[at] is None:
                log.warning("tiercel: adapter %s cannot be read; its requests are not cached", path)
        return self._digests[at]
