"""Digests of LoRA adapters by content: two adapters of one name, or one renamed, never share or lose blocks.

Reads files, so never on the scheduler's thread. An adapter that cannot be read has no digest: its requests
bypass the store.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tiercel.engines.weights import adapter_digest

log = logging.getLogger("tiercel")
_KEPT = 4096


def _seen(folder: Path) -> tuple[tuple[str, int, int, int], ...] | None:
    """What shows that an adapter's files changed, without reading them; None when they are gone."""
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    except OSError:
        return None
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats) or None


class Adapters:
    """Digests by vLLM's adapter id and path. Belongs to one thread.

    An adapter is read once: vLLM keeps the weights it loaded under an id. Should the files change, nobody can
    tell which of the two it has, now or after it made room for others: then there is no digest any more.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], bytes | None] = {}
        self._files: dict[tuple[int, str], object] = {}

    def digest(self, number: int, path: str) -> bytes | None:
        """The digest of an adapter; None if it cannot be told."""
        at, files = (number, path), _seen(Path(path))
        kind = {"kind": f"adapter {number}"}
        if at not in self._digests:
            if len(self._digests) >= _KEPT:
                oldest = next(iter(self._digests))
                del self._digests[oldest], self._files[oldest]
            self._digests[at], self._files[at] = adapter_digest(Path(path)), files
            if self._digests[at] is None:
                log.warning(
                    "tiercel: adapter %s cannot be read; its requests are not cached", path, extra=kind
                )
        elif files is not None and files != self._files[at] and self._digests[at] is not None:
            self._digests[at] = None
            log.warning(
                "tiercel: adapter %s has changed; its requests are not cached any more", path, extra=kind
            )
        return self._digests[at]
