"""Prompts through vLLM's scheduler, CPU tier and tiering, with our tiers below."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.secondary.toy import ROW, Tiered, TieredEngine, on_disk, served, socket_of
from tests.engines.vllm.toy import prompt
from tests.store.support import drop_ram, eventually, file_bytes
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiercel.engines.vllm.secondary import lookups, transfers
from tiercel.engines.vllm.secondary.pace import Pace
from tiercel.store import SecondSight

STEP = ScheduleEndContext((), ())


def reused_again(engine: TieredEngine, tokens: list[int]) -> int:
    """What one more request for a prompt finds below the CPU tier."""
    engine.lose_rows()
    return engine.cached(engine.run(f"again{engine.steps}", tokens, 1))


@pytest.mark.parametrize("more", [{}, {"blocks_per_chunk": 2}], ids=["block", "chunk"])
@pytest.mark.parametrize("window", [None, 40])
def test_what_the_cpu_tier_lost_comes_back(tmp_path: Path, window: int | None, more: dict[str, Any]) -> None:
    with served() as daemon:
        toy = Tiered(tmp_path, window=window, rows=256, tier=socket_of(daemon), more=more)
        with toy.start() as engine:
            tokens = prompt(161)
            assert engine.cached(engine.run("cold", tokens, 4)) == 0
            engine.forget()
            assert engine.cached(engine.run("rows", tokens, 4)) == 160
            assert engine.count("loaded_chunks") == 0
            engine.lose_rows()
            assert engine.cached(engine.run("ours", tokens, 4)) == 160
            assert engine.count("loaded_chunks") > 0
            assert engine.count("loaded_bytes") == engine.count("loaded_chunks") * ROW
            assert engine.count("loads_failed") == 0
            engine.settled()


def test_chunks_that_a_small_cpu_tier_evicts(tmp_path: Path) -> None:
    """Nothing but traffic: five prompts through a CPU tier with room for two, and again."""
    with served() as daemon, Tiered(tmp_path, rows=24, blocks=33, tier=socket_of(daemon)).start() as engine:
        for turn in range(2):
            for number in range(5):
                reused = engine.cached(engine.run(f"{turn}.{number}", prompt(161, number), 2))
                assert reused == (160 if turn else 0), (turn, number)
        engine.settled()


def test_a_lookup_is_retried_until_it_is_answered(tmp_path: Path) -> None:
    with served() as daemon, Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
        request = engine.run("cold", prompt(161), 1)
        there = make_offload_key(request.block_hashes[0], 0)
        gone = make_offload_key(b"\1" * 32, 0)
        engine.lose_rows()
        context, tier = ReqContext("r"), engine.ours
        engine.manager.on_new_request(context)
        assert tier.lookup(there, context) is LookupResult.RETRY
        assert tier.lookup(gone, context) is LookupResult.RETRY
        engine.manager.on_schedule_end(STEP)
        assert eventually(lambda: tier.lookup(there, context) is LookupResult.HIT)
        assert tier.lookup(gone, context) is LookupResult.MISS
        engine.manager.on_request_finished(context)
        engine.settled()


def test_hits_are_told_as_such_of_a_disk(tmp_path: Path) -> None:
    with served() as daemon, Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
        engine.run("cold", prompt(161), 1)
        engine.lose_rows()
        assert engine.ours.cache_hit_source is CacheHitSource.DISK
        engine.run("warm", prompt(161), 1)
        named = {name for name in engine.stats if name.endswith("tiering_chunk_hits")}
        assert named
        engine.settled()


def test_an_engine_that_starts_anew_finds_what_the_last_one_left(tmp_path: Path) -> None:
    with on_disk(tmp_path / "disk") as (daemon, tier):
        for number in range(3):
            with Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
                assert engine.cached(engine.run("r", prompt(161), 4)) == (160 if number else 0)
                engine.settled()
            assert daemon.inner.flush(10)
            drop_ram(daemon.inner)
        assert tier.reads


def test_two_engines_share_one_daemon(tmp_path: Path) -> None:
    with (
        served() as daemon,
        Tiered(tmp_path, tier=socket_of(daemon)).start() as one,
        Tiered(tmp_path, tier=socket_of(daemon)).start() as two,
    ):
        one.run("first", prompt(161, shared=96), 2)
        assert two.cached(two.run("same", prompt(161, shared=96), 2)) == 160
        assert two.cached(two.run("branch", prompt(161, 7, shared=96), 2)) == 0  # in its prefix cache
        two.forget()
        assert one.cached(one.run("back", prompt(161, 7, shared=96), 2)) == 64
        one.settled()
        two.settled()


def test_salts_share_nothing(tmp_path: Path) -> None:
    """D04."""
    with served() as daemon, Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
        tokens = prompt(161)
        engine.run("a", tokens, 1, salt="a")
        engine.lose_rows()
        assert engine.cached(engine.run("b", tokens, 1, salt="b")) == 0
        assert engine.cached(engine.run("none", tokens, 1)) == 0
        engine.lose_rows()
        assert engine.cached(engine.run("again", tokens, 1, salt="a")) == 160


def test_a_tier_keeps_its_cap_and_evicts_the_oldest(tmp_path: Path) -> None:
    """D30: two and a half MiB into one."""
    cap_bytes = 1 << 20
    with (
        on_disk(tmp_path / "disk", cap_bytes=cap_bytes) as (daemon, _),
        Tiered(tmp_path, tier=socket_of(daemon)).start() as engine,
    ):
        for number in range(5):
            engine.run(f"r{number}", prompt(1000, number), 1)
            assert daemon.inner.flush(10)
            assert file_bytes(tmp_path / "disk") <= cap_bytes
        drop_ram(daemon.inner)
        engine.lose_rows()
        assert engine.cached(engine.run("old", prompt(1000, 0), 1)) == 0
        engine.lose_rows()
        assert engine.cached(engine.run("new", prompt(1000, 4), 1)) == 992
        assert daemon.inner.stats().tiers[0].counters.evicted_blocks > 0
        engine.settled()


def test_an_aborted_request_leaves_nothing_behind(tmp_path: Path) -> None:
    """D16: while its chunks are looked up and while they are loaded."""
    with served() as daemon, Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens, 1)
        for number in range(20):
            engine.lose_rows()
            engine.add(f"gone{number}", tokens, 1)
            for _ in range(number % 5):
                engine.step()
            engine.abort(f"gone{number}")
            engine.settled()
        engine.lose_rows()
        assert engine.cached(engine.run("kept", tokens, 1)) == 160
        engine.settled()


def test_a_queue_that_is_full_drops_stores_and_holds_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_WAITING_MAX", 1)
    monkeypatch.setattr(lookups, "ASK_DEADLINE_S", 0.01)
    with (
        on_disk(tmp_path / "disk") as (daemon, _),
        Tiered(tmp_path, rows=16, tier=socket_of(daemon)).start() as engine,
    ):
        with daemon.inner.lock:  # the daemon answers nobody
            for number in range(8):
                engine.add(f"r{number}", prompt(33, number), 1)
            assert eventually(lambda: engine.step() or len(engine.finished) == 8)
        engine.drain()
        assert engine.count("stores_skipped") > 0
        engine.settled()
        assert eventually(lambda: reused_again(engine, prompt(113)) == 112)


def test_vllm_s_backpressure_sees_how_long_our_stores_take(tmp_path: Path) -> None:
    slow = {"backpressure_cls": "EMABackpressureDetector", "high_water_s": 1e-9, "low_water_s": 1e-10}
    pressure = {**slow, "warmup_completions": 2, "policy_cls": "DropStorePolicy"}
    with served() as daemon:
        toy = Tiered(tmp_path, tier={**socket_of(daemon), "backpressure": pressure})
        with toy.start() as engine:
            for number in range(8):
                engine.run(f"r{number}", prompt(161, number), 1)
            assert engine.stats["vllm:kv_offload_tiering_backpressure_stores_dropped"] > 0
            assert 0 < engine.count("stored_chunks") < 80
            engine.settled()


def test_admission_at_the_second_sight(tmp_path: Path) -> None:
    """D37."""
    with (
        served(admission=SecondSight()) as daemon,
        Tiered(tmp_path, tier=socket_of(daemon)).start() as engine,
    ):
        for expected in (0, 0, 160):
            engine.lose_rows()
            assert engine.cached(engine.run(f"r{expected}", prompt(161), 1)) == expected
        assert daemon.inner.stats().counters.not_admitted > 0
        engine.settled()


@pytest.mark.parametrize(
    ("hints", "stored", "reused"), [({}, 10, 160), ({"no_store": True}, 0, 0), ({"no_load": True}, 10, 0)]
)
def test_hints_of_requests(tmp_path: Path, hints: dict[str, Any], stored: int, reused: int) -> None:
    with served() as daemon, Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
        asked = {"extra_args": {"kv_transfer_params": {"tiercel": hints}}}
        engine.run("cold", prompt(161), 1, **asked)
        assert engine.count("stored_chunks") == stored
        engine.lose_rows()
        assert engine.cached(engine.run("warm", prompt(161), 1, **asked)) == reused
        engine.settled()


def test_pinned_prompts_stay(tmp_path: Path) -> None:
    with served(slots=64) as daemon, Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
        asked = {"extra_args": {"kv_transfer_params": {"tiercel": {"pin": "10m", "nonsense": 1}}}}
        engine.run("pinned", prompt(161), 1, **asked)
        engine.run("not", prompt(161, 1), 1)
        for number in range(2, 12):
            engine.run(f"r{number}", prompt(161, number), 1)
        engine.lose_rows()
        assert engine.cached(engine.run("again", prompt(161), 1)) == 160
        engine.lose_rows()
        assert engine.cached(engine.run("gone", prompt(161, 1), 1)) == 0
        assert engine.count("hints_ignored") == 1


def test_weights_that_may_have_changed(tmp_path: Path) -> None:
    """D06: vLLM's reset is the end of what was stored, here; what a new engine has of the files stays."""
    with served() as daemon:
        tier = socket_of(daemon)
        with Tiered(tmp_path, tier=tier).start() as engine:
            engine.run("old", prompt(161), 1)
            running = engine.add("running", prompt(161, 1), 8)
            engine.step()
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            engine.drain()
            assert engine.cached(engine.run("again", prompt(161), 1)) == 0
            engine.lose_rows()
            assert engine.cached(engine.run("new", prompt(161), 1)) == 160
            # Computed while the weights changed: in no cache of ours.
            assert running.request_id in engine.finished
            engine.lose_rows()
            assert engine.cached(engine.run("mixed", prompt(161, 1), 1)) == 0
            engine.settled()
        with Tiered(tmp_path, tier=tier).start() as engine:
            assert engine.cached(engine.run("files", prompt(161), 1)) == 160


def test_a_daemon_that_does_not_answer_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "ASK_DEADLINE_S", 0.2)
    monkeypatch.setattr(transfers, "_STORE_DEADLINE_S", 0.2)
    with served() as daemon, Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
        engine.run("cold", prompt(161), 1)
        engine.lose_rows()
        with daemon.inner.lock:
            assert engine.cached(engine.run("warm", prompt(161), 1)) == 0
            assert engine.count("lookups_timed_out") == 1
        engine.settled()
        assert eventually(lambda: reused_again(engine, prompt(161)) == 160)
        assert engine.count("scheduler_seconds") < 1.0


def test_a_prompt_is_dated_as_a_whole(tmp_path: Path) -> None:
    """Its beginning, which vLLM serves from its own caches and never asks for, is evicted last here too."""
    with served(slots=44) as daemon, Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
        engine.run("head", prompt(81, shared=80), 1)
        for number in range(6):
            # The head comes from vLLM's prefix cache each time; only what follows is stored.
            engine.run(f"r{number}", prompt(241, number, shared=80), 1)
        engine.lose_rows()
        assert engine.cached(engine.run("again", prompt(241, 5, shared=80), 1)) >= 80
        engine.settled()


def test_d36_what_costs_more_to_load_than_to_compute_is_computed(tmp_path: Path) -> None:
    """The same prompt over the same tier: loaded while it is quick, computed once it is known to be slow."""
    tokens = prompt(113)
    with (
        on_disk(tmp_path / "disk") as (daemon, tier),
        Tiered(tmp_path, tier=socket_of(daemon), token_s=0.001, prices=True).start() as engine,
    ):

        def reused(name: str) -> int:
            engine.lose_rows()
            assert daemon.inner.flush(10)
            drop_ram(daemon.inner)
            return engine.cached(engine.run(name, tokens, 1))

        for number in range(4):
            engine.run(f"cold{number}", prompt(113, number), 1)
        assert engine.ours._pace.prompt(7, 16) is not None
        assert reused("quick") == 112

        def slowly(keys: Any, records: Any) -> Any:
            time.sleep(0.2)
            return tier.inner.read(keys, records)

        tier.faults["read"] = slowly
        assert any(reused(f"slow{number}") == 0 for number in range(4))
        assert daemon.inner.stats().counters.priced_out > 0
        engine.settled()


def test_a_step_s_time_is_told_from_when_its_chunks_come_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pace, seen = Pace(), list[tuple[int, int, float]]()
    monkeypatch.setattr(pace._estimator, "observe", lambda *one: seen.append(one))

    def down(after_s: float, name: str, first: int, stop: int) -> None:
        clock[0] += after_s
        pace.came_down(name, first, stop, 16)

    pace.began("one step")
    pace.scheduled(["one step"])
    down(0.5, "one step", 0, 10)
    pace.over("one step")
    assert seen == [(160, 0, 0.5)]
    pace.began("chunked")
    pace.scheduled(["chunked"])
    down(0.9, "chunked", 0, 10)
    down(0.5, "chunked", 10, 20)
    pace.over("chunked")
    assert seen[1:] == [(160, 160, 0.5)]
    # Not from its beginning, with a gap, or with others beside it: tells nothing.
    for first, other in ((4, False), (0, True)):
        pace.began("r")
        pace.scheduled(["r"])
        if other:
            pace.began("other")
        down(0.5, "r", first, 20)
        pace.over("other")
        pace.over("r")
    assert len(seen) == 2
