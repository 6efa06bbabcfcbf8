"""Where the demo's blocks lie on disk: a directory of its own, or the user's; and how they go again."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiercel.blocks import TAG_BYTES
from tiercel.config import human_bytes, writable_cache_dir
from tiercel.errors import ConfigError, TierError
from tiercel.memory import filesystem_free_bytes
from tiercel.tiers import FilesTier


class Place:
    """The cache directory of one run. `tag` names the run's blocks in it, once it is known."""

    def __init__(self, path: Path, *, ours: bool, keep: bool) -> None:
        self.path, self.ours, self.keep = path, ours, keep
        self.tag: bytes | None = None

    def require_room(self, need_bytes: int) -> None:
        """Raises TierError when the file system has fewer than `need_bytes` free."""
        free_bytes = filesystem_free_bytes(self.path)
        if free_bytes < need_bytes:
            raise TierError(
                f"cache directory {self.path}: the demo writes about {human_bytes(need_bytes)}, "
                f"{human_bytes(free_bytes)} are free"
            )

    def leave(self) -> None:
        """Remove what this run stored, unless it is to be kept; never what was there before."""
        if self.keep:
            return
        if self.ours:
            shutil.rmtree(self.path, ignore_errors=True)
        elif self.tag is not None:
            # A files tier keeps each scope in a folder of its own, and the run's salt is a scope of its own.
            assert len(self.tag) == TAG_BYTES
            shutil.rmtree(self.path / self.tag.hex(), ignore_errors=True)


@contextmanager
def cache_place(explicit: Path | None, *, keep: bool) -> Iterator[Place]:
    """The directory `explicit`, or a new one inside Tiercel's cache directory; left in order at the end.

    Raises TierError when `explicit` cannot be a cache, ConfigError when no cache directory can be written.
    """
    if explicit is not None:
        place = Place(explicit, ours=False, keep=keep)
        FilesTier(place.path).close()  # refuses what is not a cache before minutes are spent
    else:
        folder = writable_cache_dir()
        try:
            path = Path(tempfile.mkdtemp(prefix=f"demo-{os.getpid()}-", dir=folder))
        except OSError as error:
            raise ConfigError(f"cache directory {folder} cannot be written to: {error.strerror}") from None
        place = Place(path, ours=True, keep=keep)
    try:
        yield place
    finally:
        place.leave()
