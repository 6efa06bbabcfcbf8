"""All checks in order, each within its deadline, each handed out as soon as it is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tiercel.config import Config, TierConfig, human_bytes
from tiercel.config.schema import FILES, MEMORY
from tiercel.config.values import masked
from tiercel.doctor import access, host, running, software
from tiercel.doctor.finding import Checked, Finding, Verdict, ok, skip
from tiercel.doctor.learned import belief, learned
from tiercel.doctor.patient import Patient
from tiercel.doctor.running import Daemon
from tiercel.doctor.self_test import self_test
from tiercel.doctor.speed import Speed, clock_there, direct_io, measure, round_trip, told
from tiercel.doctor.within import found_within
from tiercel.doctor.worth import Prefill, worth
from tiercel.tiers.registry import tier_names

_EXTRAS = {"objects": "objects", "mooncake": "mooncake"}
_SILENT = "it did not answer; see above"
_SLOW_ADVICE = "see whether the place is mounted, reachable and idle; --deadline waits longer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What to look at. `quick` measures nothing; `deadline_s` is the longest wait for one check."""

    config: Config
    socket: Path
    socket_named: bool = False
    quick: bool = False
    deadline_s: float = 10.0
    prefill: Prefill = field(default_factory=Prefill)


def examine(asked: Questions) -> Iterator[Checked]:
    """Yield what each check found. Blocks; leaves nothing behind, also when the caller stops early."""
    daemon = running.look(asked.socket, asked.socket_named, asked.deadline_s)
    yield from _of_host(asked, daemon)
    yield from _of_software(asked.config)
    yield from _of_daemon(asked, daemon)
    prefill = learned(asked.prefill, daemon)
    held = {tier.name: tier.used_bytes for tier in daemon.stats.tiers} if daemon.stats else {}
    tiers = asked.config.tiers
    if not tiers:
        yield _checked("tiers", "tiers", lambda: skip("none configured", "add one: RAM is lost at a restart"))
    for tier, name in zip(tiers, tier_names([tier.kind for tier in tiers]), strict=True):
        yield from _of_tier(asked, tier, name, held.get(name), prefill)


def _of_host(asked: Questions, daemon: Daemon) -> Iterator[Checked]:
    seen = host.read_host()
    ram_bytes, wanted_bytes = asked.config.ram.size_bytes, asked.config.host_bytes
    held_bytes = daemon.arena_bytes
    rdma = any("protocol=rdma" in (tier.url or "") for tier in asked.config.tiers)
    for name, check in (
        ("memory", lambda: host.memory(seen, wanted_bytes, held_bytes)),
        ("memory limit", lambda: host.cgroup(seen, wanted_bytes, held_bytes)),
        ("shared memory", lambda: host.shared_memory(seen)),
        ("memory files", lambda: host.memory_file(seen)),
        ("NUMA", lambda: host.numa(seen, ram_bytes)),
        ("locked memory", lambda: host.locked_memory(seen, ram_bytes, rdma)),
        ("open files", lambda: host.open_files(seen)),
        ("clock", lambda: host.clock(seen)),
    ):
        yield _checked("host", name, check)


def _of_software(config: Config) -> Iterator[Checked]:
    extras = {_EXTRAS[tier.kind] for tier in config.tiers if tier.kind in _EXTRAS}
    extras |= {"encryption" for tier in config.tiers if tier.encrypt is not None}
    yield _checked("software", "libraries", lambda: software.libraries(extras))
    yield _checked("software", "vLLM", software.vllm)
    yield _checked("software", "transformers", software.transformers)


def _of_daemon(asked: Questions, daemon: Daemon) -> Iterator[Checked]:
    yield _checked("daemon", "socket", lambda: access.socket_place(asked.socket))
    yield _checked("daemon", "answers", lambda: running.reachable(daemon))
    stats = daemon.stats
    if stats is not None:
        yield _checked("daemon", "tiers in use", lambda: running.tiers(stats))
        yield _checked("daemon", "keeping", lambda: running.keeping(stats))
        yield _checked("daemon", "cost model", lambda: belief(daemon))


def _of_tier(
    asked: Questions, tier: TierConfig, name: str, held_bytes: int | None, prefill: Prefill
) -> Iterator[Checked]:
    group = f"tier {name}: {_place(tier)}"
    wait_s = asked.deadline_s

    def check(what: str, look: Callable[[], Finding]) -> Checked:
        return _checked(group, what, lambda: found_within(wait_s, look, _SLOW_ADVICE))

    if tier.kind == FILES:
        yield check("directory", lambda: access.tier_directory(tier))
        yield check("room", lambda: access.room(tier, _held(tier, held_bytes, asked.quick)))
    source = tier.encrypt
    if source is not None and access.key_file(source) is not None:
        yield check("key", lambda: access.key_file(source) or skip("not from a file"))
    if asked.quick and tier.kind == FILES:
        return
    patient = Patient(tier, name, asked.config)
    try:
        yield (opened := check("opens", lambda: _open(patient)))
        if opened.finding.verdict is Verdict.OK and not asked.quick:
            yield from _measured(patient, check, prefill, wait_s)
    finally:
        patient.close()


def _place(tier: TierConfig) -> str:
    if tier.kind == MEMORY:
        return human_bytes(tier.size_bytes or 0)
    return str(tier.path) if tier.path is not None else masked(tier.url or "")


def _held(tier: TierConfig, known_bytes: int | None, quick: bool) -> int | None:
    """What a tier of files holds: a daemon knows; else it is counted, if that is allowed."""
    if known_bytes is not None or tier.path is None:
        return known_bytes
    if not tier.path.exists():
        return 0
    return None if quick else access.held_bytes(tier.path)


def _open(patient: Patient) -> Finding:
    began_s = time.monotonic()
    patient.open()
    took_s = time.monotonic() - began_s
    return ok(f"open after {took_s * 1e3:.0f} ms", took_s, "s")


def _measured(
    patient: Patient,
    check: Callable[[str, Callable[[], Finding]], Checked],
    prefill: Prefill,
    wait_s: float,
) -> Iterator[Checked]:
    if not (patient.files or patient.memory):
        yield check("round trip", lambda: round_trip(patient))
    if not patient.writes:
        yield check("self-test", lambda: skip("write = off: nothing is written there"))
        return
    if patient.files:
        yield check("direct I/O", lambda: direct_io(patient))
        yield check("clock", lambda: clock_there(patient))
    speeds: list[Speed] = []

    def speed() -> Finding:
        with patient.working:
            answer = measure(patient)
        if isinstance(answer, Finding):
            return answer
        speeds.append(answer)
        return told(answer)

    def tested() -> Finding:
        with patient.working:
            return self_test(patient, wait_s)

    if patient.memory:
        # It takes as long as its codec, which only a running store can tell.
        yield check("self-test", tested)
        return
    yield check("speed", speed)
    if not speeds:
        # What does not take or give back plain records fails here too, and may hang for as long again.
        yield check("self-test", lambda: skip(_SILENT))
        return
    yield check("self-test", tested)
    yield check("break-even", lambda: worth(speeds[0], prefill))


def _checked(group: str, name: str, check: Callable[[], Finding]) -> Checked:
    began_s = time.monotonic()
    finding = check()
    # A fault of a library may quote a URL as it was given.
    finding = replace(finding, said=masked(finding.said), advice=masked(finding.advice))
    return Checked(group, name, finding, time.monotonic() - began_s)
