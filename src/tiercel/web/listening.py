"""Sockets a server listens on: bound before anything slow begins, and the address people type.

Imports nothing heavy: whoever only starts a server binds here too.
"""

from __future__ import annotations

import ipaddress
import socket

from tiercel.errors import ConfigError

_BACKLOG = 256
# How much of an answer the system may hold for a client. Left to itself it would take megabytes of a stream
# that nobody reads, which is hours of some, before anybody could see that.
_UNREAD_BYTES = 64 << 10


def bind(host: str, port: int, named: tuple[str, str] = ("serve.host", "serve.port")) -> socket.socket:
    """A socket bound to the address and listening. Raises ConfigError in one line.

    `named` is what host and port are called where they were given.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{named[0]}: '{host}' is not an address of this host: {error}") from None
    one = socket.socket(family, kind, protocol)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        one.bind(address)
        # Two servers may bind a port that neither listens on yet; only one of them may listen.
        one.listen(_BACKLOG)
    except OSError as error:
        one.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{named[1]}: cannot listen on {host} port {port}: {reason}; accepted is a free port, 0 takes any"
        ) from None
    return one


def url_of(bound: socket.socket) -> str:
    """The address people type, such as http://127.0.0.1:8000."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_open_to_others(bound: socket.socket) -> bool:
    """Whether hosts other than this one can reach the socket."""
    return not ipaddress.ip_address(bound.getsockname()[0].split("%")[0]).is_loopback
