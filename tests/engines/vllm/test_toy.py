"""Cold equals warm, byte for byte, through vLLM's real scheduler: the stories of the promises."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.toy import BLOCK, Toy, ToyEngine, prompt, toy_store
from tests.store.support import FaultyTier, disk, drop_ram, eventually
from vllm.lora.request import LoRARequest

from tiercel.engines.vllm import naming
from tiercel.engines.vllm.worker import WorkerSide
from tiercel.store import LaneOptions, TieredStore


@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 160, 161])
def test_a_prompt_comes_back_whatever_its_length(tmp_path: Path, length: int, units: int) -> None:
    """D23: whole blocks only, and one token is always left to compute."""
    with Toy(tmp_path, toy_store(), units=units).start() as engine:
        tokens = prompt(length)
        engine.run("cold", tokens, 20)
        engine.forget()
        warm = engine.run("warm", tokens, 20)
        size = BLOCK * units
        assert engine.cached(warm) == (length - 1) // size * size
        engine.settled()


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("local", [0, 16, 32, 48, 64, 80])
def test_what_the_engine_holds_itself_is_not_written_over(tmp_path: Path, local: int, units: int) -> None:
    """D22: the engine's own prefix ends anywhere in our blocks; only what follows is loaded."""
    with Toy(tmp_path, toy_store(), units=units).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens)
        engine.forget()
        if local:
            engine.run("first", tokens[: local + 1])
        warm = engine.run("warm", tokens)
        size = BLOCK * units
        assert engine.cached(warm) == 160 // size * size - min(local // BLOCK * BLOCK, 160)
        engine.settled()


def test_generated_tokens_are_kept_too(tmp_path: Path) -> None:
    with Toy(tmp_path, toy_store()).start() as engine:
        tokens = prompt(40)
        engine.run("turn1", tokens, 30)
        engine.forget()
        longer = tokens + engine.outputs["turn1"] + prompt(10, 3)
        second = engine.run("turn2", longer, 5)
        assert engine.cached(second) == 64


@pytest.mark.parametrize("units", [1, 2])
def test_many_at_once_with_shared_prefixes(tmp_path: Path, units: int) -> None:
    with Toy(tmp_path, toy_store(slots=600), blocks=257, units=units).start() as engine:
        for round_ in range(3):
            for number in range(24):
                length = 20 + 13 * number
                engine.add(f"r{round_}-{number}", prompt(length, number, shared=number * 7), 8)
            engine.drain()
            for number in range(24):
                engine.check(f"r{round_}-{number}")
            engine.forget()
        assert engine.stats["loaded_tokens"] > 3000
        engine.settled()


def test_blocks_come_back_from_disk_and_after_a_restart(tmp_path: Path) -> None:
    tier = tmp_path / "disk"
    tier.mkdir()
    tokens = [prompt(100 + 31 * number, number) for number in range(4)]

    def store() -> TieredStore:
        return toy_store((disk(tier), LaneOptions(cap_bytes=1 << 30)))

    with store() as first, Toy(tmp_path, first).start() as engine:
        for number, one in enumerate(tokens):
            engine.run(f"cold{number}", one, 4)
        engine.settled()
        assert first.flush(10)
        drop_ram(first)
        engine.forget()
        warm = engine.run("disk", tokens[3], 4)
        assert engine.cached(warm) == 192
    with store() as second, Toy(tmp_path, second).start() as engine:
        for number, one in enumerate(tokens):
            warm = engine.run(f"warm{number}", one, 4)
            assert engine.cached(warm) == (len(one) - 1) // BLOCK * BLOCK
        engine.settled()


@pytest.mark.parametrize("window", [None, 40])
def test_preemption_and_resumption(tmp_path: Path, window: int | None) -> None:
    """D15: blocks of a preempted request are reused at once; what is stored must be what was computed."""
    with Toy(tmp_path, toy_store(slots=600), blocks=33, window=window).start() as engine:
        for round_ in range(3):
            for number in range(10):
                engine.add(f"r{round_}-{number}", prompt(60 + 9 * number, number), 60)
            engine.drain()
            for number in range(10):
                engine.check(f"r{round_}-{number}")
            engine.forget()
        engine.settled()
        assert engine.preemptions > 0
        assert engine.stats["loaded_tokens"] > 0


def storm(engine: ToyEngine, requests: int, seed: int) -> None:
    """Requests come, some are aborted at any moment, blocks are short; free blocks return to their start."""
    rng = random.Random(seed)
    alive: list[str] = []
    for number in range(requests):
        name = f"{seed}-{number}"
        engine.add(name, prompt(rng.randrange(1, 300), rng.randrange(40), shared=rng.randrange(200)), 20)
        alive.append(name)
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.05:
            engine.scheduler.reset_prefix_cache()
        if alive and rng.random() < 0.3:
            name = alive.pop(rng.randrange(len(alive)))
            if name not in engine.finished:
                engine.abort(name)
        alive = [name for name in alive if name not in engine.finished]
    engine.drain()
    for name, how in engine.finished.items():
        if how != "aborted":
            engine.check(name)
    engine.settled()


@pytest.mark.parametrize(("window", "units"), [(None, 1), (None, 2), (40, 1)])
def test_aborts_leak_nothing(tmp_path: Path, window: int | None, units: int) -> None:
    """D16, D24: whatever a request is doing when its client leaves, its blocks and leases come back."""
    store = toy_store(slots=96)
    with Toy(tmp_path, store, blocks=49, window=window, units=units).start() as engine:
        storm(engine, 100, seed=1)
        assert engine.stats["loads"] > 0
        assert engine.preemptions > 0


@pytest.mark.soak
@pytest.mark.parametrize("window", [None, 40])
def test_a_thousand_requests_with_aborts(tmp_path: Path, window: int | None) -> None:
    tier = tmp_path / "disk"
    tier.mkdir()
    store = toy_store((disk(tier), LaneOptions(cap_bytes=1 << 22)), slots=64)
    with Toy(tmp_path, store, blocks=49, window=window).start() as engine:
        storm(engine, 1000, seed=2)


def test_salts_isolate(tmp_path: Path) -> None:
    """D04: with a control that hits."""
    with Toy(tmp_path, toy_store()).start() as engine:
        tokens = prompt(100)
        engine.run("a", tokens, salt="a")
        engine.forget()
        assert engine.cached(engine.run("b", tokens, salt="b")) == 0
        engine.forget()
        assert engine.cached(engine.run("none", tokens)) == 0
        engine.forget()
        assert engine.cached(engine.run("again", tokens, salt="a")) == 96


def adapter(folder: Path, name: str, content: bytes) -> str:
    (folder / name).mkdir()
    (folder / name / "adapter_model.safetensors").write_bytes(content)
    return str(folder / name)


def test_adapters_isolate_by_content(tmp_path: Path) -> None:
    """D02, D05: adapters are told apart by content, and never share with the bare model."""
    one, other = adapter(tmp_path, "one", b"1"), adapter(tmp_path, "other", b"2")
    options = {"enable_lora": True, "max_loras": 2}
    store, tokens = toy_store(), prompt(100)
    with Toy(tmp_path, store, options=options).start() as engine:
        engine.run("bare", tokens)
        engine.forget()
        assert engine.cached(engine.run("one", tokens, lora=LoRARequest("x", 1, one))) == 0
        engine.forget()
        assert engine.cached(engine.run("other", tokens, lora=LoRARequest("x2", 2, other))) == 0
        engine.forget()
        assert engine.cached(engine.run("one again", tokens, lora=LoRARequest("x", 1, one))) == 96
        engine.forget()
        assert engine.cached(engine.run("bare again", tokens)) == 96
        engine.forget()
        missing = LoRARequest("x3", 3, str(tmp_path / "missing"))
        assert engine.cached(engine.run("missing", tokens, lora=missing)) == 0
    # The same name and path with other content, in an engine that starts anew.
    (Path(one) / "adapter_model.safetensors").write_bytes(b"3")
    with Toy(tmp_path, store, options=options).start() as engine:
        assert engine.cached(engine.run("changed", tokens, lora=LoRARequest("x", 1, one))) == 0
        engine.forget()
        assert engine.cached(engine.run("bare", tokens)) == 96


def test_prompt_log_probs_bypass_reading(tmp_path: Path) -> None:
    with Toy(tmp_path, toy_store()).start() as engine:
        tokens = prompt(100)
        engine.run("cold", tokens)
        engine.forget()
        engine.add("logprobs", tokens, 1, prompt_logprobs=1)
        engine.drain()
        assert engine.external["logprobs"] == 0
        engine.forget()
        assert engine.cached(engine.run("control", tokens)) == 96


@pytest.mark.parametrize("window", [8, 16, 24, 40, 200])
def test_full_attention_and_windows_together(tmp_path: Path, window: int) -> None:
    """D42: each group gets back what it needs, and only that."""
    with Toy(tmp_path, toy_store(), window=window, blocks=129).start() as engine:
        for length in (17, 64, 100, 161, 300):
            tokens = prompt(length, length)
            engine.run(f"cold{length}", tokens, 40)
            engine.forget()
            warm = engine.run(f"warm{length}", tokens, 40)
            assert engine.cached(warm) == (length - 1) // BLOCK * BLOCK
            longer = tokens + engine.outputs[f"warm{length}"] + prompt(30, 5)
            engine.forget()
            assert engine.cached(engine.run(f"longer{length}", longer, 10)) >= length
            engine.forget()
        engine.settled()


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("window", [None, 40])
def test_every_layout_comes_back(tmp_path: Path, layout: str, window: int | None) -> None:
    """D11: packed, strided, head-outermost; whatever vLLM registers, byte-equal after scrubbing."""
    with Toy(tmp_path, toy_store(), layout=layout, window=window, layers=3).start() as engine:
        tokens = prompt(130)
        engine.run("cold", tokens, 5)
        engine.forget()
        for view in engine.ranks[0].views.values():
            view.fill_(float("nan"))
        assert engine.cached(engine.run("warm", tokens, 5)) == 128


def test_another_layout_of_the_same_model_misses(tmp_path: Path) -> None:
    store, tokens = toy_store(), prompt(100)
    with Toy(tmp_path, store, layout="LBHNC").start() as engine:
        engine.run("cold", tokens)
        engine.settled()
    with Toy(tmp_path, store, layout="LBNHC").start() as engine:
        assert engine.cached(engine.run("other", tokens)) == 0
    with Toy(tmp_path, store, layout="LBHNC", blocks=33).start() as engine:
        assert engine.cached(engine.run("same", tokens)) == 96


def test_two_models_never_share_and_two_engines_do(tmp_path: Path) -> None:
    store, tokens = toy_store(), prompt(100)
    with Toy(tmp_path, store).start() as engine:
        engine.run("cold", tokens)
        engine.settled()
    with Toy(tmp_path, store, seed=5).start() as engine:
        assert engine.cached(engine.run("other model", tokens)) == 0
    with Toy(tmp_path, store).start() as engine:
        assert engine.cached(engine.run("same model", tokens)) == 96


def test_a_reset_forgets_everything_at_once(tmp_path: Path) -> None:
    """D06: vLLM resets its connector when weights change: no old block is served, no new one shared."""
    store, tokens = toy_store(), prompt(100)
    with Toy(tmp_path, store).start() as engine:
        engine.run("old weights", tokens)
        engine.forget()
        assert engine.cached(engine.run("control", tokens)) == 96
        engine.drain()
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.toy.seed = 9  # the weights change in place
        assert store.stats().ram_blocks == 0
        assert engine.cached(engine.run("new weights", tokens)) == 0
        engine.forget()
        assert engine.cached(engine.run("new weights again", tokens)) == 96
        engine.settled()
    with Toy(tmp_path, store).start() as engine:
        # From the files on disk, which never changed: what the changed weights computed must not show.
        assert engine.cached(engine.run("restarted", tokens)) == 0


def test_what_was_computed_before_a_reset_is_not_stored_after_it(tmp_path: Path) -> None:
    """D06: requests that run through a reset carry KV of the old weights to their end."""
    store, tokens = toy_store(), prompt(100)
    with Toy(tmp_path, store).start() as engine:
        engine.begin("running", tokens, 60)
        for _ in range(3):
            engine.step()
        assert engine.connector.reset_cache()
        engine.drain()
        engine.check("running")
        assert eventually(lambda: store.stats().ram_blocks == 0)
        engine.forget()
        engine.run("after", tokens, 60)
        engine.settled()
        assert store.stats().ram_blocks == 9


def test_what_is_still_being_saved_at_a_reset_is_cleared_once_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D06: a save that comes late stores under the old names, where others would look."""
    store, reset, save = toy_store(), threading.Event(), WorkerSide._save
    late = list[int]()

    def saved_late(*args: Any) -> None:
        assert reset.wait(20)
        save(*args)
        late.append(store.stats().ram_blocks)

    monkeypatch.setattr(WorkerSide, "_save", saved_late)
    with Toy(tmp_path, store).start() as engine:
        engine.begin("running", prompt(100), 60)
        assert engine.connector.reset_cache()
        reset.set()
        engine.drain()
        assert late == [6], "it was stored after the reset"
        assert eventually(lambda: store.stats().ram_blocks == 0)
        engine.settled()


def test_figures_add_up(tmp_path: Path) -> None:
    """D39: hits over looked-up tokens, bytes and blocks as moved."""
    with Toy(tmp_path, toy_store()).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens)
        engine.forget()
        engine.run("warm", tokens)
        engine.settled()
        stats = engine.stats
        assert stats["looked_up_tokens"] == 322
        assert stats["hit_tokens"] == stats["loaded_tokens"] == 160
        assert stats["loaded_bytes"] == stats["saved_bytes"] == 10 * 2 * 1024
        assert (stats["loads"], stats["loads_failed"], stats["saved_blocks"]) == (1, 0, 10)
        assert stats["scheduler_calls"] > 0


def test_the_last_block_of_a_hit_is_left_to_a_drafter(tmp_path: Path) -> None:
    """D44: a drafter's entry for a token depends on the next one, so a hit ends one block earlier."""
    with Toy(tmp_path, toy_store()).start() as engine:
        engine.connector._scheduler.side._drops_last = True
        tokens = prompt(165)
        engine.run("cold", tokens)
        engine.forget()
        assert engine.cached(engine.run("same", tokens)) == 144
        engine.forget()
        assert engine.cached(engine.run("longer", tokens + prompt(20, 3))) == 144
        engine.settled()


def test_fifty_requests_for_one_prefix_cost_one_load(tmp_path: Path) -> None:
    """D21: each block is read from its tier once, however many wait for it."""
    (tmp_path / "disk").mkdir()
    tier = FaultyTier(disk(tmp_path / "disk"))
    store = toy_store((tier, LaneOptions(cap_bytes=1 << 30)), slots=600)
    with Toy(tmp_path, store, blocks=1025, options={"max_num_seqs": 64}).start() as engine:
        engine.run("cold", prompt(161))
        engine.forget()
        assert store.flush(10)
        drop_ram(store)
        for number in range(50):
            engine.add(f"r{number}", [*prompt(161), number], 2)
        engine.drain()
        for number in range(50):
            engine.check(f"r{number}")
        assert len(tier.reads) == len(set(tier.reads)) == 10
        engine.settled()


def test_d38_a_request_that_waits_for_room_is_named_and_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for it in every step that has no room for it; it must not be hashed again each time."""
    store, looked_up, named = toy_store(), list[int](), list[int]()
    lookup, rechain = store.lookup, naming.Scope.rechain

    def counted(chain: Any, *args: Any, **options: Any) -> Any:
        looked_up.append(len(chain))
        return lookup(chain, *args, **options)

    def naming_them(scope: Any, hashes: Any, parents: Any = ()) -> Any:
        named.append(len(hashes))
        return rechain(scope, hashes, parents)

    with Toy(tmp_path, store, blocks=33).start() as engine:
        engine.run("cold", prompt(321))
        engine.forget()
        monkeypatch.setattr(store, "lookup", counted)
        engine.begin("runs", prompt(280, 1), 150)
        asked = engine.connector._scheduler.side.matched
        waits = list[int]()
        monkeypatch.setattr(
            engine.connector._scheduler.side, "matched", lambda *args: waits.append(1) or asked(*args)
        )
        looked_up.clear()
        monkeypatch.setattr(naming.Scope, "rechain", naming_them)
        engine.add("waits", prompt(321), 2)
        for _ in range(100):
            engine.step()
        assert len(waits) >= 90
        assert looked_up == [20]
        assert sum(named) <= 20 + 280 // BLOCK + 10, "each block once, those of the other request included"
        monkeypatch.undo()
        engine.drain()
        engine.check("waits")
        engine.settled()
