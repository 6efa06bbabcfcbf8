"""What the URL of a `mooncake` tier says: master, transport, how records are kept. Opens nothing.

mooncake://master:50051?protocol=tcp&segment=512MB&replicas=1&soft_pin=yes&admin=9003
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tiercel.errors import TierError
from tiercel.tiers.url import TierUrl

PORT = 50051
ADMIN_PORT = 9003
PREFIX = "tiercel:"
METADATA = "P2PHANDSHAKE"
PROTOCOLS = ("tcp", "rdma")
_REPLICAS_MAX = 16
# The client refuses less.
_SEGMENT_BYTES_MIN, _SEGMENT_BYTES_MAX = 16 << 20, 1 << 42
# Nothing that means more than itself in the query of the master's listing.
_PREFIX = re.compile(r"[A-Za-z0-9._:/-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """A pool and our part in it.

    `segment_bytes`: memory this process gives to the pool. `admin_port`: the master's HTTP port, for listing
    and health; None does without. `local`: the address at which others reach this process; None: the one it
    reaches the master from.
    """

    host: str
    port: int = PORT
    admin_port: int | None = ADMIN_PORT
    metadata: str = METADATA
    protocol: str = "tcp"
    devices: str = ""
    local: str | None = None
    segment_bytes: int = 0
    replicas: int = 1
    soft_pin: bool = False
    prefix: str = PREFIX


def read_url(url: TierUrl) -> MooncakeOptions:
    """Raises `TierError`, one line, for what is not accepted."""
    if url.scheme != "mooncake":
        raise TierError(f"{url}: scheme '{url.scheme}' is not accepted; accepted: mooncake")
    if not url.host or url.path.strip("/") or url.user or url.password:
        raise TierError(f"{url}: accepted: mooncake://MASTER_HOST:PORT?name=value, without user or path")
    prefix = url.text("prefix", PREFIX)
    if not _PREFIX.fullmatch(prefix):
        raise url.refuse("prefix", "is not accepted; accepted: 1 to 64 of letters, digits and . _ : / -")
    options = MooncakeOptions(
        host=url.host,
        port=url.port or PORT,
        admin_port=_admin_port(url),
        metadata=url.text("metadata", METADATA),
        protocol=url.choice("protocol", PROTOCOLS, "tcp"),
        devices=url.text("devices", ""),
        local=url.text("local", None),
        segment_bytes=url.size("segment", 0, _SEGMENT_BYTES_MIN, _SEGMENT_BYTES_MAX),
        replicas=url.integer("replicas", 1, low=1, high=_REPLICAS_MAX),
        soft_pin=url.flag("soft_pin", False),
        prefix=prefix,
    )
    url.done()
    return options


def _admin_port(url: TierUrl) -> int | None:
    if url.text("admin", None) == "no":
        return None
    try:
        return url.integer("admin", ADMIN_PORT, low=1, high=65535)
    except TierError:
        raise url.refuse("admin", "is not accepted; accepted: a port from 1 to 65535, or no") from None
