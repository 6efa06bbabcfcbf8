"""The daemon, if one runs: whether it answers, how its tiers fare, whether it keeps what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tiercel.config import human_bytes
from tiercel.doctor.finding import Finding, fail, ok, skip, warn
from tiercel.doctor.within import within
from tiercel.service.connecting import reach
from tiercel.service.wire import Figures
from tiercel.store import StoreStats, TierStats
from tiercel.store.policy import Decision

_DECISIONS = 64


@dataclass(frozen=True, slots=True)
class Daemon:
    """What was found at a socket. `asked`: somebody named the socket, so there should be one."""

    path: Path
    asked: bool
    figures: Figures | None = None
    decisions: tuple[Decision, ...] = ()
    trouble: str = ""

    @property
    def stats(self) -> StoreStats | None:
        """The store's figures; None while there is no daemon, or no engine has opened its store."""
        return None if self.figures is None else self.figures.stats

    @property
    def arena_bytes(self) -> int:
        """What its arena takes."""
        return 0 if self.stats is None else self.stats.slots * self.stats.slot_bytes


def look(path: Path, asked: bool, deadline_s: float) -> Daemon:
    """Ask the daemon at a socket how it is, if there is one."""
    if not path.exists() and not asked:
        return Daemon(path, asked)

    def ask() -> Daemon:
        with reach(path) as store:
            figures = store.figures()
            seen = store.overview(_DECISIONS) if figures is not None and figures.stats is not None else None
        trouble = "" if figures else "does not say how it is"
        return Daemon(path, asked, figures, seen.decisions if seen else (), trouble)

    answer = within(deadline_s, ask)
    return Daemon(path, asked, trouble=answer) if isinstance(answer, str) else answer


def reachable(daemon: Daemon) -> Finding:
    """Whether a daemon answers, of our version of the protocol."""
    if daemon.figures is not None:
        told = daemon.figures
        said = (
            f"process {told.pid} at {daemon.path}: up {told.uptime_s:.0f} s, {told.clients - 1} other clients"
        )
        return ok(said, told.uptime_s, "s")
    if not daemon.trouble:
        return skip(f"none runs at {daemon.path}")
    return fail(daemon.trouble, f"start one there: tiercel daemon --socket {daemon.path}")


def tiers(stats: StoreStats) -> Finding:
    """Whether every tier of the running store is in use: breakers, full disks, bad bytes."""
    out = [f"{tier.name} ({tier.breaker})" for tier in stats.tiers if tier.breaker != "closed"]
    if out:
        said = f"not in use now: {', '.join(out)}"
        return fail(said, "the daemon's log says why; it tries again by itself", len(out), "tiers")
    bad = [text for tier in stats.tiers for text in _faults(tier)]
    if bad:
        advice = "tiercel cache verify checks what lies there; the log says what failed"
        return warn(f"in use, with faults since the start: {', '.join(bad)}", advice, len(bad), "kinds")
    names = ", ".join(tier.name for tier in stats.tiers) or "no tiers"
    return ok(f"{names}: breakers closed, no faults since the start", len(stats.tiers), "tiers")


def keeping(stats: StoreStats) -> Finding:
    """Whether the store keeps what it is given."""
    counters = stats.counters
    offered = counters.stored + counters.stores_skipped
    said = f"{counters.stored:,} blocks stored, {counters.stores_skipped:,} not for want of a slot"
    if counters.stores_skipped > offered / 100:
        advice = "raise ram.size: RAM is full of blocks in use, pinned or waiting for slow tiers"
        return warn(said, advice, counters.stores_skipped, "blocks")
    full = (
        f"{stats.slots - stats.slots_free} of {stats.slots} slots of {human_bytes(stats.slot_bytes)} in use"
    )
    return ok(f"{said}; {full}", counters.stored, "blocks")


def _faults(tier: TierStats) -> list[str]:
    counters = tier.counters
    kinds = {
        "corrupt": counters.corrupt,
        "failed": counters.failed,
        "full": counters.full,
        "writes dropped": counters.writes_dropped,
    }
    return [f"{tier.name} {name} {count:,}" for name, count in kinds.items() if count]
