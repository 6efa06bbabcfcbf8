"""What the URL of a `valkey` tier says: the server, how to log in, how records are kept. Opens nothing.

    valkey://user:password@host:6379/0?ttl=1d       valkeys://host?ca=/etc/ca.pem       valkey:///run/valkey.sock

`valkeys` and `rediss` (or `tls=yes`) speak TLS; `redis` means `valkey`.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from tiercel.errors import TierError
from tiercel.tiers.url import TierUrl
from tiercel.tiers.valkey_pool import Address, Login

PORT = 6379
PREFIX = "tiercel:"
SCHEMES = ("valkey", "valkeys", "redis", "rediss")
# No braces, which choose the slot in a cluster, and nothing that means more than itself in a pattern.
_PREFIX = re.compile(r"[A-Za-z0-9._:/-]{1,64}", re.ASCII)
_DB_MAX = 2**20


@dataclass(frozen=True, slots=True)
class ValkeyOptions:
    """How records are kept. `ttl_s`: seconds until the server forgets it; `refresh`: after its last use."""

    prefix: str = PREFIX
    ttl_s: int | None = None
    refresh: bool = True


def read_url(url: TierUrl) -> tuple[Address, Login, ValkeyOptions]:
    """Raises `TierError`, one line, for what is not accepted, such as files of TLS that cannot be read."""
    if url.scheme not in SCHEMES:
        raise TierError(f"{url}: scheme '{url.scheme}' is not accepted; accepted: {', '.join(SCHEMES)}")
    prefix = url.text("prefix", PREFIX)
    if not _PREFIX.fullmatch(prefix):
        raise url.refuse("prefix", "is not accepted; accepted: 1 to 64 of letters, digits and . _ : / -")
    ttl_s = url.duration("ttl", None, low=1.0, high=3.2e9)
    options = ValkeyOptions(
        prefix, None if ttl_s is None else max(1, round(ttl_s)), url.flag("ttl_refresh", True)
    )
    address, db = _place(url)
    login = Login(
        user=url.user,
        password=url.password,
        password_file=_path(url, "password_file"),
        db=db,
        tls=_tls(url),
        tls_name=url.text("tls_name", None),
    )
    if login.password is not None and login.password_file is not None:
        raise url.refuse("password_file", "is given beside a password; accepted: one of the two")
    url.done()
    return address, login, options


def _place(url: TierUrl) -> tuple[Address, int]:
    """The address and the database: behind a host the path is a number, without one it is a socket."""
    db = url.integer("db", None, high=_DB_MAX)
    path = url.path.strip("/")
    if not url.host:
        if not path:
            raise TierError(
                f"{url} names no server; accepted: valkey://host:port/db or valkey:///path/of.sock"
            )
        return Address(url.path, 0), db or 0
    if path and (not path.isdecimal() or len(path) > len(str(_DB_MAX)) or db is not None):
        raise TierError(f"{url}: '/{path}' is not accepted; accepted: one database number, as /0 or db=0")
    return Address(url.host, url.port or PORT), int(path) if path else db or 0


def _tls(url: TierUrl) -> ssl.SSLContext | None:
    wanted = url.flag("tls", url.scheme in ("valkeys", "rediss"))
    files = {name: _path(url, name) for name in ("ca", "cert", "key")}
    if not wanted:
        for name, path in files.items():
            if path is not None:
                raise url.refuse(name, "goes with TLS only; accepted: tls=yes, or a scheme of valkeys")
        return None
    # Loading says which of several files was bad only if it is done one by one.
    name = "ca"
    try:
        context = ssl.create_default_context(cafile=files["ca"])
        name = "cert"
        if files["cert"] is not None:
            context.load_cert_chain(files["cert"], files["key"])
    except OSError as fault:
        raise url.refuse(name, f"'{files[name]}' cannot be used: {fault.strerror or fault}") from None
    return context


def _path(url: TierUrl, name: str) -> Path | None:
    text = url.text(name, None)
    return None if text is None else Path(text)
