"""The simulated hosts: conservation, queueing theory, exact small stories, and agreement with the curves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.errors import ConfigError
from tiercel.plan.simulate import Fleet, Outcome, PrefillCost, TierSpec, Trace, join_runs, play, policy_hits
from tiercel.plan.simulate import fleet as fleet_module

Make = Callable[..., Trace]
BLOCK = 1000  # bytes of a block of 4 tokens
FREE = PrefillCost(0.0)
FAST = 1e15
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=25)


def ram(blocks: int, rate: float = FAST, latency_s: float = 0.0) -> TierSpec:
    return TierSpec("ram", blocks * BLOCK, rate, latency_s)


def ssd(blocks: int, rate: float = FAST, *, shared: bool = False) -> TierSpec:
    return TierSpec("ssd", blocks * BLOCK, rate, 0.0, shared)


def simulate(trace: Trace, *tiers: TierSpec, prefill: PrefillCost = FREE, **options: object) -> Outcome:
    return play(trace, Fleet(BLOCK, tiers, prefill, **options))  # type: ignore[arg-type]


@given(prompts=PROMPTS, capacity=st.integers(1, 20))
def test_one_tier_without_waiting_hits_as_the_curve_says(make_trace: Make, prompts, capacity) -> None:
    trace = make_trace(prompts)
    outcome = simulate(trace, ram(capacity), always_load=True)
    expected = policy_hits("tiercel", trace, join_runs(trace), [capacity])[0].blocks
    assert outcome.loaded_blocks == [expected]


@given(
    prompts=PROMPTS,
    capacities=st.tuples(st.integers(0, 9), st.integers(0, 20)),
    write=st.sampled_from(["through", "evict"]),
    admission=st.sampled_from(["all", "seen-twice"]),
    promote=st.booleans(),
    hosts=st.integers(1, 3),
    split=st.booleans(),
)
def test_totals_add_up(make_trace, prompts, capacities, write, admission, promote, hosts, split) -> None:
    trace = make_trace(prompts)
    tiers = (ram(capacities[0], 1e6), ssd(capacities[1], 1e4))
    outcome = simulate(
        trace, *tiers, prefill=PrefillCost(0.1, 0.01), write=write, admission=admission, promote=promote,
        hosts=hosts, split=split,
    )  # fmt: skip
    assert sum(outcome.decisions.values()) == trace.request_count
    assert outcome.input_tokens == trace.input_tokens.sum()
    assert outcome.chain_blocks == len(trace.blocks)
    assert 0 <= outcome.used_tokens <= 4 * sum(outcome.loaded_blocks)
    assert sum(outcome.loaded_blocks) <= len(trace.blocks)
    whole = sum(PrefillCost(0.1, 0.01).seconds(int(n), 0) for n in trace.input_tokens)
    assert outcome.compute_s <= whole + 1e-9
    assert (outcome.ttft_s >= 0).all()


def test_two_private_tiers_together_hold_what_they_can(make_trace: Make) -> None:
    # Ten prompts of one block, twice over: RAM has room for none of the second round, SSD for all.
    trace = make_trace([[i] for i in range(10)] * 2)
    outcome = simulate(trace, ram(3), ssd(10), always_load=True)
    assert outcome.decisions["load all"] == 10
    assert outcome.loaded_blocks == [0, 10]


def test_on_evict_writes_only_what_falls_out(make_trace: Make) -> None:
    trace = make_trace([[i] for i in range(10)])
    assert simulate(trace, ram(4), ssd(99), write="through").written_blocks == [10, 10]
    assert simulate(trace, ram(4), ssd(99), write="evict").written_blocks == [10, 6]


def test_a_block_that_is_below_already_is_not_written_again(make_trace: Make) -> None:
    trace = make_trace([[i % 5] for i in range(50)])
    for write in ("through", "evict"):
        assert simulate(trace, ram(2), ssd(5), write=write).written_blocks[1] == 5


def test_seen_twice_keeps_single_uses_off_the_drive(make_trace: Make) -> None:
    once = make_trace([[i] for i in range(10)])
    twice = make_trace([[i] for i in range(10)] * 2)
    assert simulate(once, ram(2), ssd(99), admission="seen-twice").written_blocks[1] == 0
    assert simulate(twice, ram(2), ssd(99), admission="seen-twice").written_blocks[1] == 10
    assert simulate(once, ram(2), ssd(99), admission="all").written_blocks[1] == 10


def test_without_promotion_a_lower_tier_serves_again(make_trace: Make) -> None:
    trace = make_trace([[0], [1], [2], [0], [0]])
    moved = simulate(trace, ram(1), ssd(9), always_load=True)
    stays = simulate(trace, ram(1), ssd(9), always_load=True, promote=False)
    assert moved.written_blocks[0] == 4  # 0, 1, 2, and 0 again from the SSD
    assert stays.written_blocks[0] == 3


def test_a_shared_tier_serves_what_another_host_stored(make_trace: Make) -> None:
    trace = make_trace([[0]] * 40)
    options = {"hosts": 4, "router": "random", "always_load": True}
    alone = simulate(trace, ram(9), **options)
    shared = simulate(trace, ram(9), ssd(9, shared=True), **options)
    assert alone.decisions["nothing cached"] == 4
    assert shared.decisions["nothing cached"] == 1


def test_the_prefix_router_hits_more_than_a_random_one(make_trace: Make) -> None:
    prompts = [[session] * turn for turn in range(1, 6) for session in range(60)]
    trace = make_trace(prompts)
    hits = {
        router: simulate(trace, ram(100), hosts=8, router=router, prefill=PrefillCost(1e-3)).cached_blocks
        for router in ("prefix", "random")
    }
    assert hits["prefix"] == len(trace.blocks) - trace.block_count
    assert hits["random"] < hits["prefix"] / 2


def test_a_thousand_hosts(make_trace: Make) -> None:
    trace = make_trace([[i % 700] * 3 for i in range(2100)])
    outcome = simulate(trace, ram(99), hosts=1000, prefill=PrefillCost(1e-3))
    assert outcome.cached_blocks == 3 * 1400


def test_equal_inputs_give_equal_results(make_trace: Make) -> None:
    trace = make_trace([[i % 7, i % 3] for i in range(200)])
    options = {"hosts": 5, "router": "random", "prefill": PrefillCost(0.3)}
    first, again = (simulate(trace, ram(5), seed=1, **options) for _ in range(2))
    other = simulate(trace, ram(5), seed=2, **options)
    assert np.array_equal(first.ttft_s, again.ttft_s)
    assert not np.array_equal(first.ttft_s, other.ttft_s)


def test_warm_up_is_left_out_of_the_counts(make_trace: Make) -> None:
    trace = make_trace([[i] for i in range(10)] * 2)
    outcome = simulate(trace, ram(99), always_load=True, warmup=0.5)
    assert outcome.decisions["load all"] == 10
    assert outcome.decisions["nothing cached"] == 0
    assert len(outcome.ttft_s[outcome.measured]) == 10


def test_an_empty_trace(make_trace: Make) -> None:
    outcome = simulate(make_trace([]), ram(5), hosts=2)
    assert sum(outcome.decisions.values()) == 0


# Time. Blocks have 4 tokens and 1000 bytes; a prompt is computed at 1 s per token unless said otherwise.

SECOND_PER_TOKEN = PrefillCost(1.0)


def test_prefills_queue_for_the_engine_in_order(make_trace: Make) -> None:
    trace = make_trace([[1], [2], [3]], arrivals=[0.0, 1.0, 20.0])
    outcome = simulate(trace, prefill=SECOND_PER_TOKEN)
    assert outcome.ttft_s.tolist() == [4.0, 7.0, 4.0]
    assert simulate(trace, prefill=SECOND_PER_TOKEN, engines_per_host=2).ttft_s.tolist() == [4.0, 4.0, 4.0]


def test_a_hit_costs_latency_and_transfer_and_the_last_token(make_trace: Make) -> None:
    trace = make_trace([[1, 2], [1, 2]], arrivals=[0.0, 100.0])
    outcome = simulate(trace, ram(9, rate=1000.0, latency_s=0.5), prefill=SECOND_PER_TOKEN)
    # 0.5 s latency, 2 blocks at 1 block/s, and one token computed for its logits.
    assert outcome.ttft_s.tolist() == [8.0, 0.5 + 2.0 + 1.0]


def test_loads_queue_on_the_link(make_trace: Make) -> None:
    trace = make_trace([[1], [2], [1], [2]], arrivals=[0.0, 0.0, 100.0, 100.0])
    outcome = simulate(trace, ram(9, rate=1000.0), prefill=SECOND_PER_TOKEN, engines_per_host=2)
    assert outcome.ttft_s.tolist() == [4.0, 4.0, 1.0 + 1.0, 2.0 + 1.0]


def test_a_slow_tier_is_not_waited_for(make_trace: Make) -> None:
    trace = make_trace([[1], [1]], arrivals=[0.0, 100.0])
    slow = ram(9, rate=100.0)  # 10 s for what computes in 4
    outcome = simulate(trace, slow, prefill=SECOND_PER_TOKEN)
    assert outcome.decisions["recompute"] == 1
    assert outcome.ttft_s.tolist() == [4.0, 4.0]
    forced = simulate(trace, slow, prefill=SECOND_PER_TOKEN, always_load=True)
    assert forced.ttft_s.tolist() == [4.0, 11.0]


def test_a_split_ends_load_and_compute_together(make_trace: Make) -> None:
    trace = make_trace([[1] * 10 + [2], [1] * 10 + [3]], arrivals=[0.0, 1000.0])
    tier = ram(99, rate=250.0)  # 4 s per block, as long as computing it
    plain = simulate(trace, tier, prefill=SECOND_PER_TOKEN)
    split = simulate(trace, tier, prefill=SECOND_PER_TOKEN, split=True)
    assert plain.ttft_s[1] == 44.0
    assert split.ttft_s[1] == 20.0 + 4.0  # five blocks each, then the new one
    assert split.decisions["split"] == 1


def test_what_was_stored_while_waiting_is_used(make_trace: Make) -> None:
    # The second request arrives before the first has computed the shared prompt, and waits behind it.
    trace = make_trace([[1, 2], [1, 2]], arrivals=[0.0, 1.0])
    outcome = simulate(trace, ram(9), prefill=SECOND_PER_TOKEN)
    assert outcome.ttft_s.tolist() == pytest.approx([8.0, 8.0 - 1.0 + 1.0])


def test_waiting_of_a_queue_with_random_arrivals(make_trace: Make) -> None:
    """M/D/1: mean waiting is rho * S / (2 * (1 - rho)) (Pollaczek and Khinchine)."""
    rng = np.random.default_rng(7)
    count, service_s, load = 60_000, 4.0, 0.6
    arrivals = np.cumsum(rng.exponential(service_s / load, count))
    outcome = simulate(make_trace([[0]] * count, arrivals=arrivals), prefill=SECOND_PER_TOKEN)
    waiting = outcome.ttft_s.mean() - service_s
    assert waiting == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.05)


def test_gpu_time_does_not_depend_on_the_number_of_hosts_without_a_cache(make_trace: Make) -> None:
    trace = make_trace([[i] * (i % 5) for i in range(100)])
    times = [simulate(trace, prefill=PrefillCost(0.1, 0.01), hosts=n).compute_s for n in (1, 7)]
    assert times[0] == pytest.approx(times[1])


def test_large_traces_move_blocks_in_runs(make_trace: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make_trace([[i % 5] * 40 for i in range(20)])
    exact = simulate(trace, ram(100), always_load=True)
    monkeypatch.setattr(fleet_module, "REFS_MAX", 100)
    coarse = simulate(trace, ram(100), always_load=True)
    assert (exact.run_blocks_max, coarse.run_blocks_max) == (1, 8)
    assert coarse.loaded_blocks[0] <= exact.loaded_blocks[0]
    unbounded = simulate(trace, ram(1000), always_load=True)
    assert unbounded.loaded_blocks == [40 * 15]


def test_the_published_trace_gains_from_a_cache(published_trace: Trace) -> None:
    # 70B on one 8-GPU host of four: 2 FLOPs per parameter, 80 layers of 64 heads of 128, at half of peak.
    flops = 8 * 989e12 * 0.5
    prefill = PrefillCost(2 * 70.55e9 / flops, 2 * 80 * 64 * 256 / flops)
    tiers = (TierSpec("ram", 500 * 10**9, 100e9), TierSpec("ssd", 2 * 10**12, 25e9, 2e-4))
    fleet = Fleet(512 * 327_680, tiers, prefill, hosts=4, gpus_per_engine=8)
    without, with_cache = play(published_trace, replace(fleet, tiers=())), play(published_trace, fleet)
    for percent in (50, 90, 99):
        assert np.percentile(with_cache.ttft_s, percent) < np.percentile(without.ttft_s, percent)
    assert 0.25 < 1 - with_cache.compute_s / without.compute_s < 0.37
    # The cost of prefill alone, at $3.50 per GPU-hour, as an independent prototype had it: 0.362 per 1M.
    dollars = without.compute_s * 8 / 3600 * 3.5 / (without.input_tokens / 1e6)
    assert dollars == pytest.approx(0.362, rel=0.01)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hosts": 0}, "hosts is 0"),
        ({"hosts": 1001}, "hosts is 1001; accepted: 1 to 1000"),
        ({"block_bytes": 0}, "block_bytes is 0"),
        ({"warmup": 1.0}, "warmup is 1"),
        ({"tiers": (ram(1), ram(2))}, "tiers are named ram, ram"),
        ({"tiers": (ssd(1, shared=True), ram(2))}, "shared tiers last"),
    ],
)
def test_a_fleet_that_cannot_be(change: dict[str, object], told: str) -> None:
    good = Fleet(BLOCK, (ram(1),), FREE)
    with pytest.raises(ConfigError, match=told):
        replace(good, **change)  # type: ignore[arg-type]
