"""Figures for Prometheus: what is exported is what was counted, named by the conventions, and few."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.store.support import RECORD, FaultyTier, chain, disk, drop_ram, get, make_store, put, raising

from tiercel.service.prometheus import BREAKER_STATES, FAULT_KINDS, StoreCollector
from tiercel.store import Decision, Fault, LaneOptions, RequestTotals, StoreCounters, StoreStats, TierStats
from tiercel.store.breaker import BreakerState
from tiercel.store.figures import TierCounters
from tiercel.store.policy import ACTIONS, OUTCOMES
from tiercel.store.reports import Reports


def exported(stats: StoreStats | None) -> dict[str, float]:
    """Series by name and labels, as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(lambda: stats))
    series: dict[str, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for one in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(one.labels.items()))
            series[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    return series


def reported(*decisions: Decision) -> RequestTotals:
    kept = Reports()
    for one in decisions:
        kept.add(one)
    return kept.totals()


def many_tiers(count: int) -> StoreStats:
    names = [f"tier-{number}" for number in range(count)]
    told = [
        Decision(
            prompt_tokens=100, block_tokens=4, reason="", reused_tokens={name: 10}, ttft_s=1.0,
            action=action, outcome=outcome, engine=f"engine-{name}",
        )
        for name in names for action in ACTIONS for outcome in OUTCOMES
    ]  # fmt: skip
    return StoreStats(
        10, 4096, 3, 7, 1, 2, 0, StoreCounters(loaded=dict.fromkeys(names, 3)),
        tuple(TierStats(name, 1, 2, 3, 0, "open", TierCounters()) for name in names),
        requests=reported(*told),
        faults=tuple(Fault(kind, name, "secret", 1, 1.0) for name in names for kind in FAULT_KINDS),
    )  # fmt: skip


def test_what_is_exported_is_what_happened(tmp_path: Path) -> None:
    tier = FaultyTier(disk(tmp_path))
    with make_store((tier, LaneOptions())) as store:
        assert put(store, chain(4)) == 4
        assert store.flush(10)
        drop_ram(store)
        assert get(store, chain(4)) == ["disk"] * 4
        assert store.lookup(chain(6)).blocks == 4
        drop_ram(store)
        tier.faults["read"] = raising
        assert get(store, chain(1)) == []
        tier.faults.clear()
        assert store.clear() == 4
        store.report(
            Decision(
                prompt_tokens=24, block_tokens=4, reason="", reused_tokens={"disk": 16}, computed_tokens=8,
                action="load", ttft_s=0.2, saved_s=1.5, spent_s=0.25, engine="e", done=True,
            )
        )  # fmt: skip
        series = exported(store.stats())
    expected = {
        "tiercel_requests_total{outcome=answered}": 1, "tiercel_requests_total{outcome=failed}": 0,
        "tiercel_decisions_total{action=load}": 1, "tiercel_decisions_total{action=miss}": 0,
        "tiercel_prompt_tokens_total": 24, "tiercel_computed_tokens_total": 8,
        "tiercel_reused_tokens_total{place=disk}": 16, "tiercel_saved_prefill_seconds_total": 1.5,
        "tiercel_spent_seconds_total": 0.25, "tiercel_unpriced_requests_total": 0,
        "tiercel_time_to_first_token_seconds_count{reuse=store}": 1,
        "tiercel_time_to_first_token_seconds_sum{reuse=store}": 0.2,
        "tiercel_time_to_first_token_seconds_bucket{le=0.1,reuse=store}": 0,
        "tiercel_time_to_first_token_seconds_bucket{le=0.25,reuse=store}": 1,
        "tiercel_time_to_first_token_seconds_bucket{le=+Inf,reuse=store}": 1,
        "tiercel_time_to_first_token_seconds_count{reuse=none}": 0,
        "tiercel_store_slots": 16, "tiercel_store_free_slots": 16, "tiercel_store_reserved_slots": 4,
        "tiercel_store_slot_bytes": RECORD, "tiercel_store_leases": 0, "tiercel_store_lookups_total": 1,
        "tiercel_store_looked_up_blocks_total": 6, "tiercel_store_hit_blocks_total": 4,
        "tiercel_store_stored_blocks_total": 4, "tiercel_store_failed_loads_total": 1,
        "tiercel_store_loaded_blocks_total{tier=disk}": 4, "tiercel_tier_blocks{tier=disk}": 0,
        "tiercel_tier_used_bytes{tier=disk}": 0, "tiercel_tier_breaker{state=closed,tier=disk}": 1,
        "tiercel_tier_breaker{state=open,tier=disk}": 0, "tiercel_tier_pending_writes{tier=disk}": 0,
        "tiercel_tier_pending_reads{tier=disk}": 0, "tiercel_tier_read_blocks_total{tier=disk}": 4,
        "tiercel_tier_read_bytes_total{tier=disk}": 4 * RECORD,
        "tiercel_tier_read_seconds_count{tier=disk}": 5, "tiercel_tier_written_blocks_total{tier=disk}": 4,
        "tiercel_tier_written_bytes_total{tier=disk}": 4 * RECORD,
        "tiercel_tier_faults_total{kind=read,tier=disk}": 1,
        "tiercel_tier_faults_total{kind=corrupt,tier=disk}": 0,
        "tiercel_removed_blocks_total{place=disk,reason=cleared}": 4,
        "tiercel_removed_blocks_total{place=disk,reason=capacity}": 0,
    }  # fmt: skip
    assert {name: series.get(name) for name in expected} == expected
    assert 1 <= series["tiercel_tier_write_seconds_count{tier=disk}"] <= 4
    assert "tiercel_tier_limit_bytes{tier=disk}" not in series, "no cap, no limit"


def test_a_store_that_is_not_open_yet_has_no_figures() -> None:
    assert exported(None) == {}


def families(stats: StoreStats) -> Iterator[tuple[str, str, str]]:
    for family in StoreCollector(lambda: stats).collect():
        yield family.name, family.type, family.documentation


def test_names_follow_the_conventions() -> None:
    names = [name for name, _, _ in families(many_tiers(2))]
    assert len(names) == len(set(names)) > 50
    for name, kind, words in families(many_tiers(2)):
        assert re.fullmatch(r"tiercel_[a-z][a-z_]*[a-z]", name), name
        assert not re.search(r"_(ms|us|mib|kib|gib|mb|count|s)$", name), name
        assert not name.endswith("_total"), f"{name}: the exposition adds it to counters"
        assert words.endswith("."), name
        if kind == "histogram":
            assert name.endswith("_seconds"), name
    for name in exported(many_tiers(1)):
        assert "secret" not in name


def test_the_series_are_few_whatever_is_reported() -> None:
    none, one, eight = (len(exported(many_tiers(count))) for count in (0, 1, 8))
    # Every tier costs the same, and 8 of them stay below what a scrape should weigh.
    assert eight - none == 8 * (one - none) < 800
    assert none < 150


def test_kinds_and_states_are_those_there_are() -> None:
    assert set(BREAKER_STATES) == {state.value for state in BreakerState}
    lane = (Path(__file__).parents[2] / "src/tiercel/store/lane.py").read_text()
    noted = set(re.findall(r'\.note\(f"\{self\.name\}\.(\w+)"', lane)) | set(
        re.findall(r'_(?:count_failure|failed_to)\("(\w+)"', lane)
    )
    assert noted == set(FAULT_KINDS)


@pytest.mark.parametrize("count", [0, 3])
def test_any_store_can_be_exported(count: int) -> None:
    assert exported(many_tiers(count))
