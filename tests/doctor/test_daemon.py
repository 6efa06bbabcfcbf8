"""A daemon under examination: there, not there, dead, hanging, of bad health; what it has learned."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.doctor.support import NOWHERE, config, disk, looked, of, verdicts
from tests.service.running import Running
from tests.store.support import chain, eventually, put

from tiercel.doctor import Verdict, access, running
from tiercel.doctor.learned import belief, learned
from tiercel.doctor.running import Daemon
from tiercel.doctor.worth import Prefill
from tiercel.service.wire import Figures
from tiercel.store import Choice, StoreCounters, StoreStats, TierCounters, TierStats
from tiercel.store.policy import Decision


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d") / "s"


def test_none_is_no_failure_unless_it_was_named() -> None:
    assert verdicts(looked(config(), quick=True), "daemon")["answers"] == "skip"
    found = of(looked(config(), quick=True, named=True), "daemon")
    assert found["answers"].verdict is Verdict.FAIL
    assert f"tiercel daemon --socket {NOWHERE}" in found["answers"].advice


def test_one_that_runs_passes_and_its_arena_counts_as_taken(path: Path, tmp_path: Path) -> None:
    with Running(path, disk=tmp_path / "kv") as daemon, daemon.connect() as store:
        before = of(looked(config(), socket=path, quick=True), "daemon")
        assert before["answers"].verdict is Verdict.OK
        assert f"process {daemon.process.pid}" in before["answers"].said
        put(store, chain(3))  # type: ignore[arg-type]
        checks = looked(config(), socket=path, quick=True)
        found = of(checks, "daemon")
        assert {name: one.verdict.value for name, one in found.items()} == {
            "socket": "ok", "answers": "ok", "tiers in use": "ok", "keeping": "ok", "cost model": "skip",
        }  # fmt: skip
        assert "3 blocks stored" in found["keeping"].said
        assert "the daemon's arena of 1.0 MiB is taken" in of(checks, "host")["memory"].said


def test_one_that_hangs_or_died_fails_in_time(path: Path) -> None:
    with Running(path) as daemon:
        daemon.signal(signal.SIGSTOP)
        hangs = of(looked(config(), socket=path, quick=True, deadline_s=0.5), "daemon")
        daemon.signal(signal.SIGCONT)
        daemon.kill()
        dead = of(looked(config(), socket=path, quick=True), "daemon")
    assert hangs["answers"].said == "no answer within 0.5 s"
    assert hangs["answers"].verdict is dead["answers"].verdict is Verdict.FAIL


def test_the_place_of_a_socket(tmp_path: Path) -> None:
    assert access.socket_place(tmp_path / "s").verdict is Verdict.OK
    assert access.socket_place(tmp_path / ("s" * 120)).verdict is Verdict.FAIL
    (tmp_path / "file").write_text("")
    assert access.socket_place(tmp_path / "file").verdict is Verdict.FAIL
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert access.socket_place(tmp_path / "open" / "s").verdict is Verdict.WARN


TIER = TierStats("disk", 1, 4096, None, 0, "closed", TierCounters())
STATS = StoreStats(8, 132 << 10, 4, 4, 0, 0, 0, StoreCounters(stored=100), (TIER,))


def test_breakers_and_faults_of_tiers() -> None:
    assert running.tiers(STATS).verdict is Verdict.OK
    open_ = running.tiers(replace(STATS, tiers=(TIER, replace(TIER, name="valkey", breaker="open"))))
    assert open_.verdict is Verdict.FAIL
    assert "valkey (open)" in open_.said
    for counters in (TierCounters(corrupt=1), TierCounters(failed=2), TierCounters(full=1)):
        assert (
            running.tiers(replace(STATS, tiers=(replace(TIER, counters=counters),))).verdict is Verdict.WARN
        )


def test_blocks_that_found_no_slot() -> None:
    assert running.keeping(STATS).verdict is Verdict.OK
    counters = StoreCounters(stored=100, stores_skipped=50)
    assert running.keeping(replace(STATS, counters=counters)).verdict is Verdict.WARN


def prompt(computed: int, prefill_s: float, **more: object) -> Decision:
    made = Decision(
        prompt_tokens=2000, block_tokens=256, reason="", computed_tokens=computed, prefill_s=prefill_s
    )
    return replace(made, **more)


def with_decisions(*decisions: Decision) -> Daemon:
    return Daemon(NOWHERE, False, Figures(1, 1, 1.0, STATS), decisions)


def test_prefill_is_learned_from_what_was_measured_and_what_is_given_wins() -> None:
    daemon = with_decisions(prompt(1000, 0.5), prompt(2000, 1.0), prompt(1500, 15.0), prompt(10, 1e-6))
    told = learned(Prefill(), daemon)
    assert told.tokens_per_s == 2000.0
    assert told.token_bytes == (STATS.slot_bytes - 4096) / 256
    assert "3 requests" in told.origin
    unsplit = with_decisions(prompt(1000, 0.0, ttft_s=1.25, spent_s=0.25))
    assert learned(Prefill(), unsplit).tokens_per_s == 1000.0
    given = Prefill(5.0, 7.0, "given", "of a model")
    assert learned(given, daemon) == given
    assert learned(Prefill(), with_decisions()) == Prefill()
    assert learned(Prefill(), with_decisions(prompt(10, 0.01))).tokens_per_s is None


def test_what_the_cost_model_expected_is_told() -> None:
    choice = Choice(3, 0.1, 0.4, 1.5, 3, 0.4, 0.4)
    finding = belief(with_decisions(prompt(1000, 0.5), prompt(500, 0.1, choice=choice)))
    assert finding.verdict is Verdict.OK
    assert finding.value == pytest.approx(1.1)
    assert "loading 3 blocks" in finding.said
    assert belief(with_decisions(prompt(1000, 0.5))).verdict is Verdict.SKIP


def test_break_even_by_what_a_real_daemon_was_told(path: Path, tmp_path: Path) -> None:
    choice = Choice(3, 0.1, 0.4, 1.5, 3, 0.4, 0.4)
    with Running(path) as daemon, daemon.connect() as store:
        before = of(looked(disk(tmp_path / "kv"), socket=path), "tier disk")
        store.report(prompt(1000, 0.5, choice=choice, done=True))
        eventually(lambda: store.stats().requests.requests == 1)
        checks = looked(disk(tmp_path / "kv"), socket=path)
    assert before["break-even"].verdict is Verdict.SKIP
    found = of(checks, "tier disk")["break-even"]
    assert found.verdict in (Verdict.OK, Verdict.WARN)
    assert "against 2,000 tokens/s measured in 1 request;" in found.said
    assert of(checks, "daemon")["cost model"].verdict is Verdict.OK
