"""What the connector reports of every request is what vLLM did, and a fault in it costs a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.toy import BLOCK, Toy, ToyEngine, prompt, toy_store
from tests.store.support import FaultyTier, disk, drop_ram, raising

from tiercel.engines.vllm.accounts import Accounts
from tiercel.store import Decision, LaneOptions, TieredStore


def latest(store: TieredStore) -> Decision:
    return store.decisions(1)[0]


def tokens_of(one: Decision) -> tuple[int, dict[str, int]]:
    return one.computed_tokens, dict(one.reused_tokens)


def test_a_miss_a_hit_and_what_vllm_has_itself(tmp_path: Path) -> None:
    store = toy_store()
    with Toy(tmp_path, store).start() as engine:
        tokens = prompt(100)
        engine.run("cold", tokens)
        cold = latest(store)
        assert (cold.action, cold.outcome, cold.engine, cold.prompt_tokens) == (
            "miss",
            "answered",
            "vllm",
            100,
        )
        assert tokens_of(cold) == (100, {})
        assert cold.saved_s == 0.0
        assert cold.ttft_s is not None
        assert 0 < cold.ttft_s < 60
        engine.run("own", tokens)
        own = latest(store)
        assert (own.action, tokens_of(own)) == ("miss", (4, {"engine": 96}))
        assert own.reason == "vLLM has all itself that is stored"
        engine.forget()
        engine.run("warm", tokens)
        warm = latest(store)
        assert (warm.action, tokens_of(warm)) == ("load", (4, {"ram": 96}))
        assert warm.found == warm.loaded == {"ram": 6}
        assert warm.load_s > 0
        assert warm.spent_s == warm.lookup_s + warm.load_s
        assert warm.saved_s is None, "too little was watched to price it"
        assert "6 blocks found (6 in ram)" in warm.reason
        assert len(store.decisions()) == 3


@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("local", [16, 32, 80])
def test_a_load_that_begins_within_a_block_counts_its_tokens(tmp_path: Path, local: int, units: int) -> None:
    store = toy_store()
    with Toy(tmp_path, store, units=units).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens)
        engine.forget()
        engine.run("first", tokens[: local + 1])
        warm = engine.run("warm", tokens)
        told = latest(store)
        own = told.reused_tokens["engine"]
        assert own == local
        assert (
            told.reused_tokens["ram"] == engine.cached(warm) == 160 // (BLOCK * units) * BLOCK * units - local
        )
        assert told.computed_tokens == 161 - own - told.reused_tokens["ram"]


def test_a_load_that_fails_is_told(tmp_path: Path) -> None:
    tier = FaultyTier(disk(tmp_path / "disk"))
    store = toy_store((tier, LaneOptions(read_workers=1)))
    with Toy(tmp_path, store).start() as engine:
        tokens = prompt(100)
        engine.run("cold", tokens)
        engine.forget()
        assert store.flush(10)
        drop_ram(store)
        tier.faults["read"] = raising
        engine.run("warm", tokens)
        assert tier.fired
        told = latest(store)
        assert (told.action, told.found, tokens_of(told)) == ("recompute", {"disk": 6}, (100, {}))
        assert told.reason.endswith("; 0 tokens of 96 came")
        engine.settled()


def test_what_is_aborted_is_cancelled_once(tmp_path: Path) -> None:
    store = toy_store()
    with Toy(tmp_path, store).start() as engine:
        engine.add("waits", prompt(50))
        engine.abort("waits")
        assert (latest(store).outcome, latest(store).ttft_s) == ("cancelled", None)
        engine.add("runs", prompt(300), 50)
        engine.step()
        engine.abort("runs")
        engine.drain()
        told = latest(store)
        assert (told.outcome, told.ttft_s, told.reused_tokens) == ("cancelled", None, {})
        assert told.computed_tokens in (0, 128), "the steps that were begun"
        engine.add("answers", prompt(20), 50)
        while not engine.outputs["answers"]:
            engine.step()
        engine.abort("answers")
        engine.drain()
        assert latest(store).outcome == "answered"
        assert store.stats().requests.outcomes == {"answered": 1, "cancelled": 2, "failed": 0}


def script(engine: ToyEngine, store: TieredStore, tier: FaultyTier) -> int:
    """200 requests: new and old ones, shared beginnings, from RAM, disk and vLLM itself, faults, aborts."""
    for number in range(200):
        name, seed = f"r{number}", number % 23
        engine.add(name, prompt(30 + 11 * seed, seed, shared=8 * (seed % 5)), 1 + 5 * (number % 12))
        if number % 9 == 4:
            engine.step()
            engine.abort(name)
        if number % 7 == 6:
            engine.drain()
        if number % 20 == 19:
            engine.forget()
            if number % 40 == 39:
                store.flush(10)
                drop_ram(store)
        if number == 120:
            tier.faults["read"] = raising
        if number == 150:
            tier.faults.clear()
    engine.drain()
    return 200


def test_d39_figures_agree_with_vllm_over_200_requests(tmp_path: Path) -> None:
    tier = FaultyTier(disk(tmp_path / "disk"))
    store = toy_store((tier, LaneOptions()), slots=600)
    by_name: dict[str, Decision] = {}
    with Toy(tmp_path, store, blocks=33).start() as engine:
        accounts = engine.connector._scheduler.side._accounts
        settle, began = accounts._settle, accounts.began
        seen: dict[str, Any] = {}

        def noting(name: str, now_s: float) -> None:
            settle(name, now_s)
            by_name[name] = store.decisions(1)[0]

        def beginning(request: Any) -> None:
            seen[request.request_id] = request
            began(request)

        accounts._settle, accounts.began = noting, beginning
        requests = script(engine, store, tier)
        preempted = {name for name, one in seen.items() if one.num_preemptions}
        told = store.stats().requests
        assert engine.preemptions > 0
        assert tier.fired
        engine.settled()
    assert told.requests == requests == len(by_name)
    answered = {name for name, tokens in engine.outputs.items() if tokens}
    # vLLM's own account is of the first try: it knows neither of loads that failed nor of preemptions.
    told_whole = {name for name in answered if not by_name[name].reason.endswith("came")} - preempted
    assert len(told_whole) > 100
    assert {name for name, one in by_name.items() if one.outcome == "answered"} == answered
    assert told.outcomes == {"answered": len(answered), "cancelled": requests - len(answered), "failed": 0}
    assert 0 < requests - len(answered) < 30
    for name in answered:
        one = by_name[name]
        assert one.prompt_tokens == len(engine.prompts[name])
        assert one.computed_tokens + sum(one.reused_tokens.values()) == one.prompt_tokens
        if name in told_whole:
            from_store = sum(count for place, count in one.reused_tokens.items() if place != "engine")
            assert from_store == engine.external[name], name
    assert sum(told.actions.values()) == requests
    assert told.actions["load"] > 20
    assert told.prompt_tokens == sum(len(tokens) for tokens in engine.prompts.values())
    assert told.computed_tokens == sum(one.computed_tokens for one in by_name.values())
    for place in ("ram", "disk", "engine"):
        assert (
            told.reused_tokens[place] == sum(one.reused_tokens.get(place, 0) for one in by_name.values()) > 0
        )
    assert sum(seen.count for seen in told.ttft.values()) == len(answered)
    assert (told.lost, told.bad, accounts.faults) == (0, 0, 0)


def test_d39_a_fault_in_an_account_costs_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = toy_store()
    with Toy(tmp_path, store).start() as engine:
        accounts = engine.connector._scheduler.side._accounts
        with monkeypatch.context() as broken:
            for name in ("_decision", "_answered"):
                broken.setattr(Accounts, name, raising)
            broken.setattr(accounts, "_open", Broken())
            engine.run("first", prompt(70), 5)
            assert accounts.faults > 3
        assert store.stats().requests.requests == 0
        accounts._due.clear()
        engine.run("second", prompt(70), 5)
        assert store.stats().requests.requests == 1, "the control"
        engine.settled()


class Broken(dict[str, Any]):
    """An account book that cannot be read."""

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def get(self, *_: Any) -> Any:
        raise RuntimeError
