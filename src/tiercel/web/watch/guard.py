"""Who may ask: the right host name, and the token for what changes something.

A page of a stranger that has its own name resolve to our address (DNS rebinding) sends that name as Host; so
only names that no stranger can own are answered: addresses, names without a dot, and those that were told.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import HTTPConnection

from tiercel.web.api.faults import ApiError
from tiercel.web.watch.token import same


@dataclass(frozen=True, slots=True)
class Guard:
    """What requests are held against. `token` None: whoever answers behind us judges what changes things.

    With `reads` the token is needed for looking as well. `hosts` are names to be known by, besides addresses;
    with `any_host` all are, where nothing is told without a key anyway.
    """

    token: str | None
    reads: bool = False
    hosts: Collection[str] = ()
    any_host: bool = False

    def check_host(self, request: HTTPConnection) -> None:
        """Raises ApiError for a Host that is not ours."""
        given = request.headers.getlist("host")
        if self.any_host:
            return
        if len(given) != 1 or not self._ours(given[0]):
            shown = given[0][:80] if given else "missing"
            raise ApiError(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"the Host is {shown!a}; accepted are addresses, names without a dot, and those told "
                "with --allow-host",
                code="host_not_accepted",
            )

    def check(self, request: HTTPConnection, *, changes: bool) -> None:
        """Raises ApiError unless this request may look, or with `changes`, may change something."""
        self.check_host(request)
        if self.token is None or not (changes or self.reads):
            return
        if not same(request.headers.get("authorization", "").encode("latin-1", "replace"), self.token):
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                "the token is missing or wrong; accepted is the header 'Authorization: Bearer TOKEN'",
                code="invalid_token",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _ours(self, host: str) -> bool:
        name = _without_port(host.strip().lower())
        if name is None:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return bool(name) and ("." not in name or name in self.hosts)
        return True


def _without_port(host: str) -> str | None:
    """The name in a Host header; None for what is no such header."""
    name, port = host, ""
    if host.startswith("["):
        name, closed, rest = host[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            return None
        port = rest[1:]
    elif ":" in host:
        name, _, port = host.partition(":")
    return name if not port or (port.isascii() and port.isdigit()) else None
