"""The calls an engine makes, whether it holds the store itself or a client of a daemon that does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from tiercel.blocks import Chain
from tiercel.codecs import LossyTiers
from tiercel.store.figures import Hit, StoreStats
from tiercel.store.journal import Events
from tiercel.store.leases import LeasedBlock, NewBlock
from tiercel.store.overview import Overview
from tiercel.store.policy import Decision, Prompt, Sight
from tiercel.store.steering import Steerable


class _Lease(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Reading(_Lease, Protocol):
    """A prefix on lease; see `ReadLease`."""

    def __iter__(self) -> Iterator[LeasedBlock]: ...

    def ready(self, limit: int) -> list[LeasedBlock]: ...

    def advance(self, count: int) -> None: ...

    def release(self) -> None: ...


class Writing(_Lease, Protocol):
    """Room for new blocks on lease; see `WriteLease`."""

    def __iter__(self) -> Iterator[NewBlock]: ...

    def take(self, limit: int) -> list[NewBlock]: ...

    def commit(self) -> int: ...

    def abort(self) -> None: ...


class SessionTable(Protocol):
    """What sessions left, by tenant and name; see `Sessions`."""

    def note(self, tenant: bytes, session: str, chains: Sequence[Chain]) -> None: ...

    def chains(self, tenant: bytes, session: str) -> tuple[Chain, ...]: ...


class Store(Steerable, Protocol):
    """See `TieredStore` for what each call promises. None raises for a fault of a tier or of a daemon."""

    @property
    def lossy(self) -> LossyTiers: ...

    def lookup(
        self, chain: Chain, deadline_s: float = 0.05, start: int = 0, prompt: Prompt | None = None
    ) -> Hit: ...

    def acquire(
        self, chain: Chain, deadline_s: float = 10.0, start: int = 0, *, backward: bool = False
    ) -> Reading: ...

    def begin_store(
        self,
        chain: Chain,
        start: int,
        stop: int,
        payload_bytes: int,
        deadline_s: float = 1.0,
        sight: Sight = Sight.NEW,
    ) -> Writing: ...

    def clear(self, tag: bytes | None = None, deadline_s: float = 30.0) -> int: ...

    def report(self, decision: Decision) -> Decision: ...

    def decisions(self, limit: int = 256) -> list[Decision]: ...

    def overview(self, limit: int = 64) -> Overview: ...

    def chain_of(self, prefix: str) -> Chain | None: ...

    def stats(self) -> StoreStats: ...

    def events(self, after: int, tag: bytes) -> Events: ...

    def flush(self, deadline_s: float = 30.0) -> bool: ...

    def close(self, deadline_s: float = 30.0) -> bool: ...
