"""Which Valkey node a key lives on: one server, or the slots of a cluster as it says itself.

The map is asked for when it is missing or has proved wrong, at most once a second. Whether there is a
cluster at all is found out the same way. Moves no records.

Locking: `_lock` guards the map and the pools (looking one thing up goes without it); `_asking` lets one
thread at a time ask for the map while the others go on with what they have.
"""

from __future__ import annotations

import binascii
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tiercel.tiers.valkey_pool import Address, Login, Pool
from tiercel.tiers.valkey_wire import Connection, ProtocolError, Refusal, Reply

T = TypeVar("T")

SLOTS = 16384
_REDIRECTS_MAX = 5
_REFRESH_S = 1.0
# One silent node must not use up the time that asking the next one for the map needs.
_ASK_SHARE = 0.25


def slot_of(name: bytes) -> int:
    """The slot of a name without braces: CRC-16/XMODEM modulo 16384, as the cluster specification has it."""
    return binascii.crc_hqx(name, 0) % SLOTS


class Nodes:
    """The nodes behind one address, and how to reach the right one."""

    def __init__(self, seed: Address, login: Login) -> None:
        self._seed = seed
        self._login = login
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._pools: dict[Address, Pool] = {seed: Pool(seed, login)}
        self._owners: list[Address | None] | None = None
        self._known = False
        self._stale = True
        self._asked_s = -_REFRESH_S
        self._closed = False

    @property
    def clustered(self) -> bool:
        """Whether the server said that it is part of a cluster."""
        return self._owners is not None

    def primaries(self, until_s: float) -> list[Address]:
        """Every node that owns slots, or the single server. Raises `OSError` when none can be asked."""
        self._refresh(until_s)
        with self._lock:
            if self._owners is None:
                return [self._seed]
            return sorted({owner for owner in self._owners if owner}, key=str)

    def owner(self, name: bytes, until_s: float) -> Address:
        """The node a key belongs to. Raises `OSError` when that cannot be found out."""
        if self._stale or not self._known:
            self._refresh(until_s)
        owners = self._owners
        owner = self._seed if owners is None else owners[slot_of(name)]
        if owner is None:
            self._suspect()
            raise ConnectionError("no node of the cluster owns this slot")
        return owner

    def paused(self, address: Address) -> bool:
        """Whether a node failed lately and is not tried now."""
        return self._pool(address).paused

    def at(self, address: Address, until_s: float, act: Callable[[Connection], T]) -> T:
        """Run `act` with a connection to one node. After an `OSError` the map is doubted."""
        try:
            return self._pool(address).run(until_s, act)
        except OSError:
            self._suspect()
            raise

    def follow(
        self,
        name: bytes,
        until_s: float,
        act: Callable[[Connection], T | Refusal],
        answer: T | Refusal | None = None,
    ) -> T | Refusal:
        """Run `act` where the key lives, going on from a redirection if `answer` is one already."""
        address = self.owner(name, until_s)
        for _ in range(_REDIRECTS_MAX):
            if answer is None:
                answer = self.at(address, until_s, act)
            if not isinstance(answer, Refusal) or answer.code not in ("MOVED", "ASK"):
                return answer
            asked, address = address, _target(answer, address)
            if answer.code == "MOVED":
                self._moved(name, address)
                answer = None
            else:
                answer = self.at(address, until_s, lambda connection: _asking(connection, act))
                address = asked
        return Refusal("CLUSTERDOWN", "redirected too often")

    def close(self) -> None:
        """Close every connection; what waits on one ends with an error."""
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()

    def _pool(self, address: Address) -> Pool:
        pool = self._pools.get(address)
        if pool is not None:
            return pool
        with self._lock:
            if self._closed:
                raise ConnectionError("closed")
            return self._pools.setdefault(address, Pool(address, self._login))

    def _suspect(self) -> None:
        with self._lock:
            self._stale = self._stale or self._owners is not None

    def _moved(self, name: bytes, address: Address) -> None:
        with self._lock:
            self._stale = True
            if self._owners is not None:
                self._owners[slot_of(name)] = address

    def _refresh(self, until_s: float) -> None:
        """Ask for the map if it is missing or doubted. Raises `OSError` only if there is none at all."""
        with self._lock:
            known = self._known
            due = self._stale and time.monotonic() - self._asked_s >= _REFRESH_S
        if known and not due:
            return
        if not self._asking.acquire(
            blocking=not known, timeout=-1 if known else max(0.0, until_s - time.monotonic())
        ):
            if known:
                return
            raise TimeoutError("no answer in time")
        try:
            with self._lock:
                if self._known and not (self._stale and time.monotonic() - self._asked_s >= _REFRESH_S):
                    return
                candidates = sorted(self._pools.values(), key=lambda pool: pool.paused)
            self._ask(candidates, until_s, known)
        finally:
            self._asking.release()

    def _ask(self, candidates: list[Pool], until_s: float, known: bool) -> None:
        fault: OSError = ConnectionError("no node to ask")
        for pool in candidates:
            now_s = time.monotonic()
            last = pool is candidates[-1]
            share_s = (until_s - now_s) * (1.0 if last and not known else _ASK_SHARE)
            try:
                slots = pool.run(now_s + share_s, lambda connection: connection.call(b"CLUSTER", b"SLOTS"))
                owners = _owners(slots, pool.address)
            except OSError as error:
                fault = error
                continue
            self._learn(owners)
            return
        with self._lock:
            self._asked_s = time.monotonic()
        if not known:
            raise fault

    def _learn(self, owners: list[Address | None] | None) -> None:
        with self._lock:
            self._owners, self._known, self._stale = owners, True, False
            self._asked_s = time.monotonic()
            wanted = {self._seed, *(owner for owner in owners or () if owner)}
            gone = [self._pools.pop(address) for address in set(self._pools) - wanted]
        for pool in gone:
            pool.close()


def _asking(connection: Connection, act: Callable[[Connection], T | Refusal]) -> T | Refusal:
    connection.call(b"ASKING")
    return act(connection)


def _target(redirection: Refusal, asked: Address) -> Address:
    """Where `MOVED slot host:port` points; an empty host is the one that was asked."""
    host, _, port = redirection.text.partition(" ")[2].rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ProtocolError("a redirection to nowhere")
    return Address(host or asked.host, int(port))


def _owners(reply: Reply, asked: Address) -> list[Address | None] | None:
    """The owner of each slot from `CLUSTER SLOTS`; None where there is no cluster, or no leave to ask."""
    if isinstance(reply, Refusal):
        return None
    owners: list[Address | None] = [None] * SLOTS
    for entry in reply if isinstance(reply, list) else []:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                named = host.decode("ascii", "replace") if isinstance(host, bytes) else ""
                address = Address(asked.host if named in ("", "?") else named, port)
                owners[first : last + 1] = [address] * (last - first + 1)
            case _:
                raise ProtocolError("not a map of slots")
    if not any(owners):
        raise ConnectionError("no node of the cluster owns any slot")
    return owners
