"""What a request says of its own cache use in `kv_transfer_params`, through vLLM's scheduler."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.toy import Toy, ToyEngine, prompt, toy_store
from tests.store.support import disk, drop_ram, eventually

from tiercel.engines.vllm import asker, hints
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.faults import FaultLog
from tiercel.store.sessions import tenant_of

NOBODY = tenant_of(None)


def told(**given: object) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": {"tiercel": given}}}


def tiered(folder: Path) -> TieredStore:
    (folder / "disk").mkdir()
    return toy_store((disk(folder / "disk"), LaneOptions(cap_bytes=1 << 30)))


def settle(engine: ToyEngine) -> None:
    """Let the asker do what it was asked to do when nobody waits for it."""
    asker = engine.connector._scheduler.asker
    assert eventually(lambda: not asker._desk.waiting and asker._desk.busy_s < 0)


def test_no_store_leaves_nothing_and_no_load_reuses_nothing(tmp_path: Path) -> None:
    store = toy_store()
    with Toy(tmp_path, store).start() as engine:
        tokens = prompt(100)
        engine.run("secret", tokens, 20, **told(no_store=True))
        assert store.stats().ram_blocks == 0
        engine.forget()
        engine.run("kept", tokens)
        assert store.stats().ram_blocks == 6
        engine.forget()
        assert engine.cached(engine.run("afresh", tokens, **told(no_load=True))) == 0
        engine.forget()
        assert engine.cached(engine.run("control", tokens, **told(no_store=True))) == 96
        engine.settled()


def test_a_pinned_prompt_stays_with_its_answer_and_with_what_was_found_of_it(tmp_path: Path) -> None:
    store = toy_store(slots=44)
    with Toy(tmp_path, store).start() as engine:
        tokens = prompt(100)
        engine.run("before", tokens[:65])
        engine.forget()
        engine.run("pinned", tokens, 30, **told(pin="10m"))
        engine.settled()
        settle(engine)
        assert store.stats().pins == 8, "129 tokens are computed, 64 of them were found"
        for number in range(8):
            engine.run(f"other{number}", prompt(150, 1 + number))
        assert store.ram.evictions > 0
        engine.forget()
        assert engine.cached(engine.run("again", tokens)) == 96
        assert engine.cached(engine.run("control", prompt(150, 1))) == 0


def test_what_was_found_is_pinned_also_if_nothing_new_is_stored(tmp_path: Path) -> None:
    store = toy_store()
    with Toy(tmp_path, store, ranks=2, shards=2).start() as engine:
        tokens = prompt(97)
        engine.run("cold", tokens)
        engine.forget()
        engine.run("warm", tokens, **told(pin="1h", no_store=True))
        settle(engine)
        assert store.stats().pins == 12, "on both shards"


def test_low_priority_is_for_ram_alone_and_goes_first(tmp_path: Path) -> None:
    store = tiered(tmp_path)
    with Toy(tmp_path, store).start() as engine:
        engine.run("low", prompt(100), **told(priority="low"))
        engine.run("normal", prompt(100, 1), **told(priority="normal"))
        engine.settled()
        assert store.flush(10)
        assert (store.stats().ram_blocks, store.stats().tiers[0].blocks) == (12, 6)
        engine.forget()
        assert engine.cached(engine.run("again", prompt(100))) == 96


def test_prefetch_brings_up_what_is_in_a_tier_while_the_request_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asker, "ASK_DEADLINE_S", 30.0)  # on a busy host the thread may come late
    store = tiered(tmp_path)
    with Toy(tmp_path, store, options={"max_num_seqs": 1}).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens)
        engine.forget()
        assert store.flush(10)
        drop_ram(store)
        engine.add("first", prompt(40, 7), 60)
        engine.step()
        engine.add("waits", tokens, **told(prefetch=True))
        assert eventually(lambda: store.stats().counters.loaded.get("disk", 0) == 10)
        assert "waits" not in engine.finished
        engine.drain()
        engine.check("waits")
        assert store.stats().counters.loaded["disk"] == 10, "each block was read once"


def test_a_session_names_its_blocks_for_its_tenant_alone(tmp_path: Path) -> None:
    """An agent's pause: its blocks leave RAM and come back before it does."""
    store = tiered(tmp_path)
    with Toy(tmp_path, store, ranks=2, shards=2).start() as engine:
        tokens = prompt(100)
        engine.run("turn1", tokens, 30, salt="t1", **told(session="agent-7"))
        engine.settled()
        settle(engine)
        assert store.sessions.chains(NOBODY, "agent-7") == ()
        assert store.sessions.chains(tenant_of("t2"), "agent-7") == ()
        chains = store.sessions.chains(tenant_of("t1"), "agent-7")
        assert [len(one) for one in chains] == [8, 8], "its answer too, on both shards"
        assert [store.lookup(one, 0).blocks for one in chains] == [8, 8]
        assert sum(store.demote(one) for one in chains) == 16
        assert store.stats().ram_blocks == 0
        assert sum(store.prefetch(one).result(10) for one in chains) == 16
        engine.forget()
        longer = tokens + engine.outputs["turn1"] + prompt(40, 3)
        assert engine.cached(engine.run("turn2", longer, salt="t1", **told(session="agent-7"))) == 128
        settle(engine)
        assert len(store.sessions.chains(tenant_of("t1"), "agent-7")[0]) == 10
        assert sum(store.drop(one) for one in store.sessions.chains(tenant_of("t1"), "agent-7")) == 20
        engine.forget()
        assert engine.cached(engine.run("dropped", longer, salt="t1")) == 0


def test_tenants_are_scopes_that_share_room_equally(tmp_path: Path) -> None:
    store = toy_store(slots=44)
    with Toy(tmp_path, store).start() as engine:
        engine.run("b", prompt(161), salt="b")
        for number in range(12):
            engine.run(f"a{number}", prompt(161, 1 + number), salt="a")
        assert store.ram.evictions > 60
        engine.forget()
        assert engine.cached(engine.run("back", prompt(161), salt="b")) == 160
        assert engine.cached(engine.run("flooded", prompt(161, 1), salt="a")) == 0


@pytest.mark.parametrize(
    ("params", "ignored"),
    [
        ({"tiercel": {"no_sotre": True, "pin": 5}}, 2),
        ({"tiercel": "no_store"}, 1),
        ({"tiercel": [1] * 1000}, 1),
        ({"tiercel": None}, 0),
        ({"do_remote_prefill": False, "tiercel": {}}, 0),
        (None, 0),
    ],
)
def test_what_is_no_hint_is_counted_told_of_once_and_fails_nothing(
    tmp_path: Path,
    params: object,
    ignored: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hints, "_log", FaultLog())
    caplog.set_level(logging.WARNING, "tiercel")
    with Toy(tmp_path, toy_store()).start() as engine:
        for number in range(2):
            engine.run(f"r{number}", prompt(100), extra_args={"kv_transfer_params": params})
            engine.forget()
        assert engine.cached(engine.run("warm", prompt(100))) == 96
        assert engine.stats.get("hints_ignored", 0) == 2 * ignored
    said = [one.message for one in caplog.records if "hint" in one.message]
    assert len(said) == (ignored > 0)
    assert all("kv_transfer_params.tiercel" in one for one in said)


def test_reading_hints_takes_no_time_of_the_scheduler(tmp_path: Path) -> None:
    given: Mapping[str, Any] = {str(at): {"x": [at] * 100} for at in range(1000)}
    started_s = time.perf_counter()
    for _ in range(10):
        hints.read_hints({"tiercel": given}, hints.Tally())
    assert time.perf_counter() - started_s < 1.0


def test_a_decision_is_told_with_the_answer_to_who_asks_and_to_nobody_else(tmp_path: Path) -> None:
    store = tiered(tmp_path)
    with Toy(tmp_path, store).start() as engine:
        tokens = prompt(100)
        engine.run("cold", tokens, 5, salt="secret", **told(explain=True))
        engine.forget()
        assert store.flush(10)
        drop_ram(store)
        engine.run("warm", tokens, 5, salt="secret", **told(explain=True, session="agent-7"))
        engine.run("silent", tokens, 5, salt="secret")
        engine.add("aborted", prompt(90, 7), 50, **told(explain=True))
        engine.step()
        engine.abort("aborted")
        engine.drain()
        assert set(engine.told) == {"cold", "warm"}
        cold, warm = (engine.told[name]["tiercel"] for name in ("cold", "warm"))
        assert (cold["action"], cold["found"], cold["computed_tokens"]) == ("miss", {}, 100)
        assert (warm["action"], warm["loaded"], warm["computed_tokens"]) == ("load", {"disk": 6}, 4)
        assert warm["reason"].startswith("6 blocks found (6 in disk)")
        assert json.loads(json.dumps(warm)) == warm
        assert "do_remote_prefill" not in engine.told["warm"], (
            "which would have vLLM fetch it from another engine"
        )
        assert not any(word in json.dumps(engine.told) for word in ("secret", "agent-7"))
        assert not engine.connector._scheduler.side._accounts._told
