"""Write, drop, read: a few blocks through a real store into the tier, out of RAM and back, byte for byte."""

from __future__ import annotations

import os
import time

from tiercel.blocks import Chain
from tiercel.doctor.finding import Finding, fail, ok
from tiercel.doctor.patient import Alone, Patient
from tiercel.memory import Arena
from tiercel.store import RAM, TieredStore

_BLOCKS = 4
# Blocks that wait for a tier may hold half of the slots.
_SLOTS = 4 * _BLOCKS
_ADVICE = "do not use this place: what it was given it does not give back as it should"


def self_test(patient: Patient, deadline_s: float) -> Finding:
    """One round through the tier; a finding that names the step that failed. Takes `deadline_s` per step."""
    assert patient.tier is not None
    began_s = time.monotonic()
    chain = patient.chain(_BLOCKS)
    arena = Arena(patient.record_bytes, _SLOTS, reserved=_BLOCKS)
    store = TieredStore(arena, [(Alone(patient.tier), patient.options())])
    try:
        wrong = _round(store, chain, patient, deadline_s)
        errors = store.stats().tiers[0].counters
    finally:
        store.close(0.0)
    if wrong:
        seen = {
            "corrupt": errors.corrupt,
            "missing": errors.missing,
            "failed": errors.failed,
            "full": errors.full,
        }
        counted = ", ".join(f"{name} {count}" for name, count in seen.items() if count)
        return fail(f"{wrong}{f' ({counted})' if counted else ''}", _ADVICE)
    took_s = time.monotonic() - began_s
    return ok(f"{_BLOCKS} blocks written, dropped from RAM, read back the same and deleted", took_s, "s")


def _round(store: TieredStore, chain: Chain, patient: Patient, deadline_s: float) -> str:
    """What went wrong, or nothing."""
    if store.lookup(chain, deadline_s).blocks:
        return "blocks are found that nobody has written"
    payloads = [os.urandom(patient.payload_bytes) for _ in range(_BLOCKS)]
    with store.begin_store(chain, 0, _BLOCKS, patient.payload_bytes, deadline_s) as lease:
        for room in lease:
            room.payload[:] = payloads[room.index]
        kept = lease.commit()
    if kept != _BLOCKS:
        return f"{kept} of {_BLOCKS} blocks could be kept in RAM"
    dropped = store.demote(chain, deadline_s)
    if dropped != _BLOCKS:
        return f"{dropped} of {_BLOCKS} blocks were written"
    sources = store.lookup(chain, deadline_s).sources
    if sources != (patient.name,) * _BLOCKS or RAM in sources:
        return f"{len(sources)} of {_BLOCKS} blocks are found again"
    same = 0
    with store.acquire(chain, deadline_s) as reading:
        for block in reading:
            same += bytes(block.payload) == payloads[block.index]
    if same != _BLOCKS:
        return f"{same} of {_BLOCKS} blocks came back as they were"
    store.drop(chain, deadline_s)
    assert patient.tier is not None
    if store.lookup(chain, deadline_s).blocks or any(patient.tier.contains(list(chain.keys))):
        return "blocks are still there after they were deleted"
    return ""
