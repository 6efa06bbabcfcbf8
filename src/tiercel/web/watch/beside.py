"""The site beside something else: a daemon serves its store, and in a thread of its own tells how it does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tiercel.web import serving
from tiercel.web.watch.app import make_site
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.sources import Source
from tiercel.web.watch.watch import Watch


@contextmanager
def beside(source: Source, listener: socket.socket, guard: Guard) -> Iterator[str]:
    """Serve the site while the block runs; yields its address. Closes the listener, not the source."""
    watch = Watch(source)
    watch.start()
    try:
        with serving.served(listener, make_site(watch, guard), watch.end_streams) as url:
            yield url
    finally:
        watch.close()
