"""What requests report is counted as it was, in bounds, and costs nobody a request (D39 and its kind)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.support import eventually, make_store

from tiercel.store import Decision, TieredStore, overview_json, reports
from tiercel.store.policy import ACTIONS, OUTCOMES, Choice, as_json
from tiercel.store.reports import Reports


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with make_store() as made:
        yield made


def decision(**more: Any) -> Decision:
    told: dict[str, Any] = {"prompt_tokens": 100, "block_tokens": 10, "reason": "why", "done": True}
    return Decision(**told | more)


def counted(store: TieredStore, requests: int) -> bool:
    return eventually(lambda: store.stats().requests.requests == requests)


def test_reports_add_up(store: TieredStore) -> None:
    store.report(decision(computed_tokens=100, ttft_s=0.3))
    store.report(
        decision(
            reused_tokens={"ram": 60, "disk": 30}, computed_tokens=10, action="load", saved_s=2.5,
            spent_s=0.25, ttft_s=0.02,
        )
    )  # fmt: skip
    store.report(decision(reused_tokens={"engine": 90}, computed_tokens=10, ttft_s=0.01))
    store.report(decision(reused_tokens={"ram": 50}, computed_tokens=50, action="split"))
    store.report(decision(computed_tokens=20, outcome="cancelled", action="recompute"))
    assert counted(store, 5)
    told = store.stats().requests
    assert told.outcomes == {"answered": 4, "cancelled": 1, "failed": 0}
    assert told.actions == {"miss": 2, "load": 1, "split": 1, "recompute": 1}
    assert (told.prompt_tokens, told.computed_tokens) == (500, 190)
    assert told.reused_tokens == {"ram": 110, "disk": 30, "engine": 90}
    assert (told.saved_s, told.spent_s, told.unpriced) == (2.5, 0.25, 1)
    assert {name: (seen.count, seen.sum_s) for name, seen in told.ttft.items()} == {
        "none": (1, 0.3), "engine": (1, 0.01), "store": (1, 0.02),
    }  # fmt: skip
    assert (told.lost, told.bad) == (0, 0)
    assert [one.number for one in store.decisions()] == [5, 4, 3, 2, 1]
    assert [one.action for one in store.decisions(2)] == ["recompute", "split"]


def test_d39_half_of_the_tokens_found_is_a_hit_rate_of_a_half(store: TieredStore) -> None:
    assert store.stats().requests.hit_rate == 0.0
    for request in range(10):
        hit = request % 2
        store.report(decision(reused_tokens={"ram": 100} if hit else {}, computed_tokens=0 if hit else 100))
    assert counted(store, 10)
    assert store.stats().requests.hit_rate == 0.5


def test_d39_numbers_that_cannot_be_are_brought_to_what_can(store: TieredStore) -> None:
    # A preempted request whose hit is larger than what it has now; times from a clock that went back.
    store.report(
        decision(
            reused_tokens={"ram": 500, "disk": -3}, computed_tokens=40, ttft_s=-1.0, saved_s=math.nan,
            spent_s=math.inf, lookup_s=-math.inf, prompt_tokens=100,
        )
    )  # fmt: skip
    assert counted(store, 1)
    told = store.stats().requests
    assert (told.prompt_tokens, told.computed_tokens, told.reused_tokens) == (100, 40, {"ram": 60})
    assert (told.saved_s, told.spent_s) == (0.0, 0.0)
    (kept,) = store.decisions()
    assert (kept.ttft_s, kept.lookup_s, kept.reused_tokens) == (0.0, 0.0, {"ram": 60})


def test_what_was_expected_without_end_takes_the_overview_from_nobody(store: TieredStore) -> None:
    forever = Choice(
        blocks=2, load_s=math.inf, expected_s=math.nan, recompute_s=-math.inf, meet_from=-1, meet_s=3.5
    )
    store.report(decision(choice=forever))
    assert counted(store, 1)
    (shown,) = overview_json(store.overview())["decisions"]
    assert json.loads(json.dumps(shown, allow_nan=False))["expected"] == {
        "load_blocks": 2, "load_s": 0.0, "first_token_s": 0.0, "load_all_s": 0.0, "meet_from_block": 0,
        "meet_s": 3.5, "compute_all_s": 0.0,
    }  # fmt: skip


def test_d39_a_fault_in_counting_never_reaches_who_reports(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = []

    def failing(*_: object) -> None:
        fired.append(1)
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(reports, "_count", failing)
        assert store.report(decision()).prompt_tokens == 100
        assert eventually(lambda: len(fired) == 1)
        assert eventually(lambda: store.stats().requests.bad == 1)
    store.report(decision())
    assert counted(store, 1), "the control"


def test_places_that_somebody_invents_make_no_more_series() -> None:
    kept = Reports()
    for number in range(100):
        kept.add(decision(reused_tokens={f"place-{number}": 10}))
    told = kept.totals().reused_tokens
    assert len(told) == 33
    assert sum(told.values()) == 1000
    assert told["other"] == 680


def test_the_latest_are_kept_and_no_more() -> None:
    kept = Reports()
    for _ in range(300):
        kept.add(decision(reason="r" * 5000))
    latest = kept.latest(1000)
    assert len(latest) == 256
    assert latest[0].number == 300
    assert len(latest[0].reason) == 400


numbers = st.integers(-(10**20), 10**20)
seconds = st.floats()
choices = st.builds(
    Choice, blocks=numbers, load_s=seconds, expected_s=seconds, recompute_s=seconds, meet_from=numbers,
    meet_s=seconds, all_s=seconds,
)  # fmt: skip
places = st.dictionaries(st.text(max_size=100), numbers, max_size=50)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.builds(
    Decision, prompt_tokens=numbers, block_tokens=numbers, reason=st.text(max_size=600), found=places,
    loaded=places, met=places, reused_tokens=places, computed_tokens=numbers, lookup_s=seconds,
    load_s=seconds, prefill_s=seconds, choice=st.none() | choices, action=st.sampled_from(ACTIONS),
    outcome=st.sampled_from(OUTCOMES), ttft_s=st.none() | seconds, saved_s=st.none() | seconds,
    spent_s=seconds,
), max_size=5))  # fmt: skip
def test_d39_whatever_is_reported_the_totals_only_grow_and_stay_possible(told: list[Decision]) -> None:
    kept = Reports()
    before = kept.totals()
    for one in told:
        kept.add(one)
        after = kept.totals()
        assert after.bad == 0
        assert after.requests == before.requests + 1
        for name in ("prompt_tokens", "computed_tokens", "saved_s", "spent_s", "unpriced"):
            assert getattr(after, name) >= getattr(before, name)
        assert after.computed_tokens + sum(after.reused_tokens.values()) <= after.prompt_tokens
        assert 0.0 <= after.hit_rate <= 1.0
        assert sum(seen.count for seen in after.ttft.values()) <= after.requests
        json.dumps(as_json(kept.latest(1)[0]), allow_nan=False)
        assert math.isfinite(after.saved_s + after.spent_s + sum(seen.sum_s for seen in after.ttft.values()))
        before = after
