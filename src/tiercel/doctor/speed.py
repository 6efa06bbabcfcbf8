"""How fast a tier is, measured for a second or so: round trips, writes and reads of records as a store's.

Records go through a lane: every one that comes back is verified, and what the store's own cost model makes of
the reads is what break-even is judged by. Bounded in bytes and seconds.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tiercel.blocks import BlockKey, Chain, payload_of, seal
from tiercel.config import human_bytes
from tiercel.config.schema import MIB
from tiercel.doctor.finding import Finding, fail, ok, warn
from tiercel.doctor.patient import Patient
from tiercel.store.lane import Lane
from tiercel.tiers import Fate
from tiercel.tiers.folder import record_path
from tiercel.tiers.transfer import Transfer

_FILES_BYTES_MAX, _REMOTE_BYTES_MAX = 64 * MIB, 16 * MIB
# So long at least, going over the same records again if need be, and so long at most, each way.
_LEAST_S, _MOST_S = 0.3, 1.0
_ROUNDS_MAX = 8
_ALONE = 3
_TRIPS = 9
# A token of an 8B model is 128 KiB of KV: at this rate 760 tokens a second, less than most prefill does.
_SLOW_BYTES_PER_S = 100e6
# A lookup waits so long for what a tier says is there.
_LOOKUP_S = 0.05
# Dates within this are the same to a store, which refreshes them once a minute.
_CLOCKS_APART_S = 60.0


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured. `one_read_s` and `gap_s` are what the store's cost model believes after it."""

    record_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    one_read_s: float
    gap_s: float
    cached: bool


def round_trip(patient: Patient) -> Finding:
    """How long the place takes to say that it has not got a record."""
    lane = patient.lane()
    key = patient.chain(1).keys[0]
    took_s = []
    for _ in range(_TRIPS):
        began_s = time.monotonic()
        lane.probe([key], patient.record_bytes)
        took_s.append(time.monotonic() - began_s)
        if lane.counters.failed:
            return fail("the place does not say what it holds", "see the tier's page for what it needs")
    middle_s = median(took_s)
    said = f"{middle_s * 1e3:.2f} ms to ask for a record"
    if middle_s > _LOOKUP_S:
        advice = f"lookups wait {_LOOKUP_S * 1e3:.0f} ms for it and then do without: use a nearer place"
        return warn(said, advice, middle_s, "s")
    return ok(said, middle_s, "s")


def direct_io(patient: Patient) -> Finding:
    """Whether files there can be read and written past the page cache."""
    transfer = Transfer(direct=True, place=str(patient.ground))
    page = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    with tempfile.TemporaryFile(dir=patient.ground, buffering=0) as file:
        transfer.write(file.fileno(), page)
        transfer.read(file.fileno(), page)
    if transfer.direct:
        return ok("direct I/O works")
    return warn("direct I/O is refused", "reads and writes take page cache and processor: use ext4 or xfs")


def clock_there(patient: Patient) -> Finding:
    """Whether files there are dated by a clock like ours: recency in a shared directory is by their dates."""
    with tempfile.TemporaryFile(dir=patient.ground, buffering=0) as file:
        began_s = time.time()
        file.write(b"\0")
        apart_s = os.fstat(file.fileno()).st_mtime - began_s
    said = f"files are dated {abs(apart_s):.1f} s {'ahead of' if apart_s > 0 else 'behind'} this host's clock"
    if abs(apart_s) > _CLOCKS_APART_S:
        return warn(said, "keep the clocks of this host and of the file server in step", apart_s, "s")
    return ok(said, apart_s, "s")


def measure(patient: Patient) -> Speed | Finding:
    """Write, read back, verify; a finding when that cannot be done."""
    lane = patient.lane()
    tier = lane.tier
    most_bytes = _FILES_BYTES_MAX if patient.files else _REMOTE_BYTES_MAX
    count = max(2, most_bytes // patient.record_bytes)
    chain = patient.chain(count)
    records = _records(chain, patient)
    trouble: list[str] = []

    def write(at: int) -> bool:
        (outcome,) = lane.outcomes(tier.write, [chain.keys[at]], [records[at]])
        if outcome.fate is not Fate.OK:
            trouble.append(outcome.reason or outcome.fate.value)
        return outcome.fate is Fate.OK

    written, write_s = _side_by_side(write, range(count), patient.config.write_workers, patient.stopped)
    if trouble or not written:
        return fail(f"writing failed: {_one_line(trouble)}", "see the tier's page, or make room")
    there = sorted(set(written))
    cached = patient.files and not _past_the_cache(patient, chain, there)

    own = threading.local()

    def read(at: int) -> bool:
        # A buffer for each thread: two may be at the same record, one of them a round ahead.
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(mmap.mmap(-1, patient.record_bytes))
        (header,) = lane.read([chain.keys[at]], [own.buffer])
        if header is None:
            trouble.append(_why(lane, chain.keys[at], own.buffer))
        return header is not None

    for at in there[:_ALONE]:
        read(at)
    seen, read_s = (
        ([], 1.0) if trouble else _side_by_side(read, there, patient.config.read_workers, patient.stopped)
    )
    if trouble or not seen:
        return fail(
            f"reading back failed: {_one_line(trouble)}", "do not use this place until that is mended"
        )
    now_s = time.monotonic()
    return Speed(
        record_bytes=patient.record_bytes,
        write_bytes_per_s=len(written) * patient.record_bytes / write_s,
        read_bytes_per_s=len(seen) * patient.record_bytes / read_s,
        one_read_s=lane.speed.read_s(now_s),
        gap_s=lane.speed.gap_s(now_s),
        cached=cached,
    )


def told(speed: Speed) -> Finding:
    """The measured speeds as a finding."""
    said = (
        f"writes {_rate(speed.write_bytes_per_s)}, reads {_rate(speed.read_bytes_per_s)}, one read "
        f"{speed.one_read_s * 1e3:.2f} ms (records of {human_bytes(speed.record_bytes)})"
    )
    if speed.cached:
        said += ", in part from the page cache"
    figures = {
        "write_bytes_per_s": speed.write_bytes_per_s,
        "one_read_s": speed.one_read_s,
        "gap_s": speed.gap_s,
    }
    if speed.read_bytes_per_s < _SLOW_BYTES_PER_S:
        advice = "only slow prefill gains by this: give --prefill to see, or use a faster place"
        return warn(said, advice, speed.read_bytes_per_s, "bytes/s", **figures)
    return ok(said, speed.read_bytes_per_s, "bytes/s", **figures)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _records(chain: Chain, patient: Patient) -> list[memoryview]:
    """Sealed records of bytes that no disk can compress."""
    size = patient.record_bytes
    slab = memoryview(mmap.mmap(-1, size * len(chain)))
    noise = os.urandom(patient.payload_bytes)
    records = [slab[at * size : (at + 1) * size] for at in range(len(chain))]
    for at, record in enumerate(records):
        payload_of(record, patient.payload_bytes)[:] = noise
        seal(record, chain, at, patient.payload_bytes, time.time_ns())
    return records


def _side_by_side(
    act: Callable[[int], bool], items: Sequence[int], threads: int, stopped: threading.Event
) -> tuple[list[int], float]:
    """What of `items` was done (again and again, for a while) by so many threads, and how long that took."""
    began_s = time.monotonic()
    lock = threading.Lock()
    numbers = (at for _ in range(_ROUNDS_MAX) for at in items)
    done: list[int] = []

    def work() -> None:
        while True:
            spent_s = time.monotonic() - began_s
            with lock:
                enough = (
                    stopped.is_set() or spent_s > _MOST_S or (len(done) >= len(items) and spent_s > _LEAST_S)
                )
                at = None if enough else next(numbers, None)
            if at is None or not act(at):
                return
            with lock:
                done.append(at)

    crew = [threading.Thread(target=work, name="tiercel-doctor-io", daemon=True) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return done, max(time.monotonic() - began_s, 1e-9)


def _past_the_cache(patient: Patient, chain: Chain, written: Sequence[int]) -> bool:
    """Have what was written leave the page cache. False where it may still be there."""
    root = getattr(patient.tier, "root", None)
    if getattr(patient.tier, "direct", False):
        return True
    for at in written:
        path = None if root is None else root / record_path(chain.keys[at])
        if path is None:
            return False
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            return False
        finally:
            os.close(fd)
    return True


def _why(lane: Lane, key: BlockKey, record: memoryview) -> str:
    """Why a record did not come back, in a few words."""
    if lane.counters.corrupt:
        return "other bytes came back than were written"
    (outcome,) = lane.outcomes(lane.tier.read, [key], [record])
    return outcome.reason or outcome.fate.value


def _one_line(trouble: Sequence[str]) -> str:
    return " ".join(trouble[0].split()) if trouble else "nothing was done in time"
