"""One tier under examination: opened as a store opens it, used under names of its own, and left as it was.

A directory that is not there yet is not made: what is measured is a scratch directory where it would stand.
Every record written is deleted again, also after a fault or Ctrl-C, as far as the place still answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tiercel.blocks import HEADER_BYTES, PAGE_BYTES, BlockKey, Chain, Identity, Scope, record_bytes
from tiercel.config import Config, TierConfig
from tiercel.config.schema import FILES, MEMORY, MIB
from tiercel.doctor.access import standing
from tiercel.store.faults import FaultLog
from tiercel.store.journal import Journal
from tiercel.store.lane import Lane
from tiercel.store.options import LaneOptions
from tiercel.tiers import Stored, Tier
from tiercel.tiers.extras import Tidies
from tiercel.tiers.registry import open_tier

# Where nothing says how large a block is: a usual one.
_PAYLOAD_BYTES = 2 * MIB
_PAYLOAD_BYTES_MAX = 8 * MIB
MODEL = "tiercel-doctor"
_CLEAN_UP_S = 5.0
# Of a tier in memory so much is tried; whether all of it fits is for the checks of the host.
_TRIED_BYTES = 64 * MIB


class Patient:
    """A tier by its configuration; `open` it before the rest, `close` it in any case."""

    def __init__(self, tier: TierConfig, name: str, config: Config) -> None:
        self.config = tier
        self.name = name
        slot_bytes = config.ram.slot_bytes or record_bytes(_PAYLOAD_BYTES)
        self.payload_bytes = max(PAGE_BYTES, min(slot_bytes - HEADER_BYTES, _PAYLOAD_BYTES_MAX))
        self.record_bytes = record_bytes(self.payload_bytes)
        self.slot_bytes = max(slot_bytes, self.record_bytes)
        self.tier: Tier | None = None
        # Set when no more may be written; held by whoever writes.
        self.stopped = threading.Event()
        self.working = threading.Lock()
        self._scratch: Path | None = None
        self._used: list[Chain] = []

    @property
    def files(self) -> bool:
        """Whether it is a directory."""
        return self.config.kind == FILES

    @property
    def memory(self) -> bool:
        """Whether it is memory of the process that has it."""
        return self.config.kind == MEMORY

    @property
    def writes(self) -> bool:
        """Whether the store would ever write there."""
        return self.config.write != "off"

    @property
    def ground(self) -> Path:
        """The directory whose disk is meant."""
        assert self.config.path is not None
        return self._scratch or standing(self.config.path)

    def open(self) -> None:
        """Open the place; blocks for as long as that takes. Raises TierError or OSError."""
        config = dataclasses.replace(self.config, required=True)
        if self.memory:
            config = dataclasses.replace(config, size_bytes=self.slot_bytes + _TRIED_BYTES)
        if self.files and self.config.path is not None and not self.config.path.exists():
            where = standing(self.config.path)
            self._scratch = Path(tempfile.mkdtemp(prefix=".tiercel-doctor-", dir=where))
            config = dataclasses.replace(config, path=self._scratch / "cache")
        self.tier = open_tier(config, self.name, self.slot_bytes)

    def chain(self, blocks: int) -> Chain:
        """Names nobody else has, for so many blocks; what lies under them is deleted at the end."""
        identity = Identity(
            model=MODEL, revision="1", kv_dtype="none", geometry=bytes(16), layout="doctor-1", block_tokens=1
        )
        made = Scope(identity, salt=secrets.token_hex(8)).chain(range(blocks))
        self._used.append(made)
        return made

    def lane(self) -> Lane:
        """The tier as a store's lane has it: verified, counted, with a breaker. It evicts nothing."""
        assert self.tier is not None
        lock = threading.Condition(threading.Lock())
        return Lane(Alone(self.tier), self.options(), lock, _nobody, FaultLog(), Journal())

    def options(self) -> LaneOptions:
        """As configured, but without a cap: no block of others may have to go for ours."""
        return LaneOptions(
            read_workers=self.config.read_workers,
            write_workers=self.config.write_workers,
            deadline_s=self.config.deadline_s,
        )

    def close(self) -> None:
        """Delete what was written and let go, waiting a few seconds at most."""
        self.stopped.set()
        leaving = threading.Thread(target=self._leave, name="tiercel-doctor-close", daemon=True)
        leaving.start()
        leaving.join(_CLEAN_UP_S)

    def _leave(self) -> None:
        # Who hangs in the place is not waited for.
        self.working.acquire(timeout=_CLEAN_UP_S / 2)
        tier = self.tier
        if tier is not None:
            lane = self.lane()
            for chain in self._used:
                lane.outcomes(tier.delete, list(chain.keys))
            if isinstance(tier, Tidies):
                with contextlib.suppress(OSError):
                    tier.prune([key[:8] for chain in self._used for key in chain.keys[:1]])
            tier.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


class Alone:
    """A tier without what else lies there: who opens it lists, dates and evicts nothing of others."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.name = tier.name
        self.contains = tier.contains
        self.read = tier.read
        self.write = tier.write
        self.delete = tier.delete
        self.usage = tier.usage

    def scan(self) -> Iterator[Stored]:
        return iter(())

    def close(self) -> None:
        """The patient closes the tier itself."""


def _nobody(key: BlockKey) -> bool:
    return False
