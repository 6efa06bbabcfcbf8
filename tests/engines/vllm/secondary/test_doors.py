"""The way in: versions, options, names, what is shared with whom; the way out: events and figures."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from tests.engines.vllm.secondary.toy import ROW, TIER, Tiered, TieredEngine, on_disk, served, socket_of
from tests.engines.vllm.toy import prompt
from tests.store.support import drop_ram, eventually
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tiercel.engines.vllm.secondary import TiercelTier, naming
from tiercel.engines.vllm.secondary.prefixes import Prefixes
from tiercel.engines.vllm.secondary.tier import COUNTERS
from tiercel.errors import ConfigError, EngineError, TiercelError

# In.


def test_d35_another_release_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(EngineError, match=r"^vLLM 0\.33\.1 is not supported; accepted are 0\.32$"):
        Tiered(tmp_path).start()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ram.sise": "1GiB"}, "ram.size"),
        ({"ram": {"size": "1"}}, "unit"),
        ({"tiers": [{"size": "1GiB"}]}, "tiers.0.path"),
        ({"locality": "NEAR"}, "LOCAL, REMOTE"),
        ({"config": 3}, "is not a path"),
    ],
)
def test_d41_a_wrong_option_is_one_line_that_helps(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Tiered(tmp_path, tier=options).start()
    assert str(refusal.value).startswith("secondary_tiers: ")
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo is xxhash"),
    ],
)
def test_an_engine_whose_names_cannot_be_trusted_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    pytest.importorskip("xxhash")
    with pytest.raises(EngineError, match=said):
        Tiered(tmp_path, options=options).start()


def test_a_tier_that_nobody_s_engine_makes_is_refused() -> None:
    with pytest.raises(EngineError, match="accepted is a tier made by OffloadingConnector"):
        naming.making_engine()


def test_slots_too_small_for_a_chunk_are_one_line(tmp_path: Path) -> None:
    with served() as daemon:
        toy = Tiered(tmp_path, tier=socket_of(daemon), more={"blocks_per_chunk": 8})
        with pytest.raises(TiercelError, match="slot") as refusal:
            toy.start()
        assert "\n" not in str(refusal.value)


def test_without_a_daemon_named_a_private_one_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D33, D52: no HOME, and what it wrote is there for the next engine's own daemon."""
    monkeypatch.delenv("HOME", raising=False)
    runtime = tempfile.TemporaryDirectory(prefix="tiercel-")  # a short path: a socket is made below it
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime.name)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    tier = {"ram.size": "1MiB", "tiers": [{"path": str(tmp_path / "disk"), "size": "1GiB"}]}
    for reused in (0, 160):
        with Tiered(tmp_path, tier=tier).start() as engine:
            assert engine.cached(engine.run("r", prompt(161), 1)) == reused
            assert engine.ours._store.flush(10)
            engine.settled()
    assert list(Path(runtime.name, "tiercel").glob("private-*.sock"))
    runtime.cleanup()


def test_d28_nothing_of_ours_lies_in_dev_shm(tmp_path: Path) -> None:
    """vLLM's CPU tier does; our arena is memory of the daemon, whatever the size of /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    with served() as daemon, Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
        engine.run("r", prompt(161), 1)
        assert {name.split("_")[0] for name in set(os.listdir("/dev/shm")) - before} <= {"vllm"}
        engine.settled()


# Names.


def identity(toy: Tiered) -> Any:
    with toy.start() as engine:
        return engine.ours._identity


def test_engines_that_are_alike_have_one_identity_and_others_another(tmp_path: Path) -> None:
    """D01, D07, D11, D45, D51."""
    with served() as daemon:
        tier = socket_of(daemon)
        base = identity(Tiered(tmp_path, tier=tier))
        assert base == identity(Tiered(tmp_path, tier=tier, blocks=33, rows=64))
        for other in (
            Tiered(tmp_path, tier=tier, seed=1),  # --hf-overrides and the like
            Tiered(tmp_path, tier=tier, window=40),
            Tiered(tmp_path, tier=tier, ranks=2, shards=2),
            Tiered(tmp_path, tier=tier, more={"blocks_per_chunk": 2}),
            Tiered(tmp_path, tier=tier, options={"dtype": "float32"}),
            Tiered(tmp_path, tier=tier, options={"attention_config": {"flash_attn_version": 2}}),
        ):
            assert identity(other) != base, other


def test_d07_engines_that_hash_with_another_seed_miss_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as daemon:
        for seed, reused in ((None, 0), ("7", 0), (None, 160), ("7", 160)):
            if seed is None:
                monkeypatch.delenv("PYTHONHASHSEED", raising=False)
            else:
                monkeypatch.setenv("PYTHONHASHSEED", seed)
            with Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
                assert engine.cached(engine.run("r", prompt(161), 1)) == reused


def test_d02_an_engine_with_adapters_shares_with_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served() as daemon:
        options = {"enable_lora": True, "max_lora_rank": 8}
        for _ in range(2):
            with Tiered(tmp_path, tier=socket_of(daemon), options=options).start() as engine:
                assert engine.cached(engine.run("cold", prompt(161), 1)) == 0
                engine.lose_rows()
                assert engine.cached(engine.run("warm", prompt(161), 1)) == 160
        assert "this engine's alone" in caplog.text


def test_order_is_read_off_what_vllm_notes() -> None:
    def key(number: int, group: int = 0) -> OffloadKey:
        return OffloadKey(bytes([number]) * 32 + group.to_bytes(4, "big"))

    noted = {key(number): 16 * number for number in range(5)}
    context: Any = SimpleNamespace(req_id="r", _offload_key_positions=noted)
    prefixes = Prefixes(context)
    (run,) = prefixes.runs([key(3), key(2)])
    assert (run.start, run.stop, run.key(3)) == (2, 4, key(3))
    noted |= {key(5): 80, key(9, 1): 32}
    first, second, other = prefixes.runs([key(5), key(0), key(9, 1)])
    assert (first.start, first.stop) == (0, 1)
    assert (second.start, second.stop, second.keys) == (5, 6, b"".join(key(n) for n in range(6)))
    assert (other.start, other.stop, other.group) == (0, 1, b"\0\0\0\1")
    # One that vLLM has not noted has a place behind the others.
    (late,) = prefixes.runs([key(7)])
    assert (late.start, late.stop) == (6, 7)


# Out.


class Listener:
    """What an engine publishes of our tiers."""

    def __init__(self, engine: TieredEngine) -> None:
        self.engine = engine
        self.events: list[Any] = []
        engine.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)

    def told(self, kind: type) -> set[Any]:
        """Blocks that were stored (or removed) so far, by their hashes."""
        ours = [one for one in self.events if isinstance(one, kind) and one.medium == "STORAGE"]
        return {one for event in ours for one in event.block_hashes}

    def hears(self, kind: type, blocks: int) -> bool:
        def enough() -> bool:
            self.engine.step()
            return len(self.told(kind)) >= blocks

        return eventually(enough)


def test_d40_events_say_what_can_be_had(tmp_path: Path) -> None:
    """Stored, found by another engine, evicted: a router's picture is the store's."""
    with on_disk(tmp_path / "disk", cap_bytes=1 << 20) as (daemon, _):
        tier = {**socket_of(daemon), "enable_kv_events": True, "locality": "LOCAL"}
        toy = Tiered(tmp_path, tier=tier, events=True, more={"self_describing_kv_events": True})
        with toy.start() as one, toy.start() as two:
            first, second = Listener(one), Listener(two)
            one.run("r", prompt(161), 1)
            assert first.hears(BlockStored, 10)
            stored = first.told(BlockStored)
            ours = [event for event in first.events if getattr(event, "medium", "") == "STORAGE"]
            assert {(event.ownership, event.locality) for event in ours} == {("tiercel", "LOCAL")}
            assert sorted(list(event.token_ids) for event in ours) == sorted(
                prompt(161)[at : at + 16] for at in range(0, 160, 16)
            )
            two.run("found", prompt(161), 1)
            assert second.hears(BlockStored, 10)
            assert second.told(BlockStored) == stored
            assert not first.told(BlockRemoved)
            for number in range(1, 6):
                one.run(f"r{number}", prompt(1000, number), 1)
                assert daemon.inner.flush(10)
            drop_ram(daemon.inner)
            assert eventually(lambda: one.step() or stored <= first.told(BlockRemoved))
            assert second.hears(BlockRemoved, 10)
            one.lose_rows()
            assert one.cached(one.run("again", prompt(161), 1)) == 0


def test_after_a_reset_nothing_told_of_before_is_expected(tmp_path: Path) -> None:
    with served() as daemon:
        tier = {**socket_of(daemon), "enable_kv_events": True}
        with Tiered(tmp_path, tier=tier, events=True).start() as engine:
            heard = Listener(engine)
            engine.run("r", prompt(161), 1)
            assert heard.hears(BlockStored, 10)
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
            assert heard.hears(BlockRemoved, 10)
            assert heard.told(BlockRemoved) == heard.told(BlockStored)


def test_events_are_off_unless_asked_for(tmp_path: Path) -> None:
    with served() as daemon, Tiered(tmp_path, tier=socket_of(daemon), events=True).start() as engine:
        heard = Listener(engine)
        engine.run("r", prompt(161), 1)
        engine.step()
        assert heard.events, "vLLM's own"
        assert not heard.told(BlockStored)
        assert not engine.ours.has_pending_work()


def test_every_figure_is_one_that_vllm_was_told_of(tmp_path: Path) -> None:
    """D39: vLLM ends an engine that counts what it never announced."""
    config = {"type": "TiercelTier", "module_path": "tiercel.engines.vllm.secondary"}
    announced = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [config]})
    assert {TIER + name for name in COUNTERS} <= set(announced)
    page = (Path(__file__).parents[4] / "docs/vllm-secondary.md").read_text()
    assert all(f"`{name}`" in page for name in COUNTERS)
    with served() as daemon, Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
        engine.run("cold", prompt(161), 1)
        engine.lose_rows()
        engine.run("warm", prompt(161), 1)
        ours = {name for name in engine.stats if name.startswith(TIER)}
        assert ours <= set(announced)
        assert engine.count("stored_bytes") == 10 * ROW
        assert engine.count("loaded_chunks") == 10
        assert engine.count("scheduler_calls") > 0
        assert engine.ours.get_stats() is None


def test_what_vllm_s_interface_wants_is_there() -> None:
    assert not TiercelTier.__abstractmethods__
    assert TiercelTier.build_metric_definitions({}).keys() == {TIER + name for name in COUNTERS}
