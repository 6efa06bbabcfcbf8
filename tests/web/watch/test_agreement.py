"""Two hundred scripted requests, some cut and failed: every place that tells figures says what happened."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.store.support import TOKENS, branch, drop_ram, eventually, get, put

from tiercel.cli.top_source import ServerSource
from tiercel.store import TieredStore
from tiercel.store.policy import Decision, action_of

from .running import Site
from .test_live_page import opened, says

REQUESTS = 200


@dataclasses.dataclass
class Told:
    """What really happened, counted here and nowhere else."""

    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    actions: Counter[str] = dataclasses.field(default_factory=Counter)
    reused: Counter[str] = dataclasses.field(default_factory=Counter)
    prompt: int = 0
    computed: int = 0
    saved_s: float = 0.0
    spent_s: float = 0.0
    first_s: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {"none": [], "store": []})


def scripted(store: TieredStore) -> Told:
    """Prompts that share beginnings; RAM is emptied now and then; every seventh is cut, others fail."""
    dice, told = random.Random(7), Told()
    for at in range(REQUESTS):
        of = branch(3, dice.randint(1, 4), dice.randint(1, 6))
        if at % 23 == 22:
            assert store.flush(10)
            drop_ram(store)
        sources = get(store, of)
        outcome = "cancelled" if at % 7 == 6 else "failed" if at % 11 == 10 else "answered"
        if outcome == "answered":
            put(store, of, len(sources))
        tokens = len(of) * TOKENS + dice.randint(1, TOKENS - 1)
        reused = {place: sources.count(place) * TOKENS for place in dict.fromkeys(sources)}
        # What is cut has computed only a part.
        left = tokens - sum(reused.values())
        computed = left if outcome == "answered" else dice.randint(0, left)
        ttft_s = round(dice.uniform(0.01, 2), 3) if outcome == "answered" else None
        saved_s, spent_s = len(sources) * 0.125, 0.25
        action = action_of(len(sources), len(sources))
        store.report(
            Decision(
                prompt_tokens=tokens, block_tokens=TOKENS, reason="scripted", reused_tokens=reused,
                computed_tokens=computed, action=action, outcome=outcome, ttft_s=ttft_s, saved_s=saved_s,
                spent_s=spent_s, engine="test", done=True,
            )
        )  # fmt: skip
        told.outcomes[outcome] += 1
        told.actions[action] += 1
        told.reused.update(reused)
        told.prompt += tokens
        told.computed += computed
        told.saved_s += saved_s
        told.spent_s += spent_s
        if ttft_s is not None:
            told.first_s["store" if reused else "none"].append(ttft_s)
    return told


def series(site: Site) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(site.ask("/metrics").text)
        for sample in family.samples
    }


def test_every_place_says_what_happened(browser: Any, site: Site) -> None:
    told = scripted(site.store)
    assert {"ram", "disk"} == told.reused.keys()
    assert min(told.outcomes.values()) > 10
    for seen in (site.overview(), ServerSource(site.url).read()):
        requests = seen["stats"]["requests"]
        assert requests["requests"] == REQUESTS == len(seen["decisions"]) + REQUESTS - 64
        assert requests["outcomes"] == dict(told.outcomes)
        assert {name: count for name, count in requests["actions"].items() if count} == dict(told.actions)
        assert requests["reused_tokens"] == dict(told.reused)
        assert (requests["prompt_tokens"], requests["computed_tokens"]) == (told.prompt, told.computed)
        assert requests["saved_s"] == pytest.approx(told.saved_s)
        assert requests["spent_s"] == pytest.approx(told.spent_s)
        assert requests["hit_rate"] == pytest.approx(told.reused.total() / told.prompt)
        for reuse, seconds in told.first_s.items():
            assert sum(requests["ttft"][reuse]["counts"]) == len(seconds)
            assert requests["ttft"][reuse]["sum_s"] == pytest.approx(sum(seconds))
    found = series(site)
    for outcome, count in told.outcomes.items():
        assert found["tiercel_requests_total", outcome] == count
    for action, count in told.actions.items():
        assert found["tiercel_decisions_total", action] == count
    for place, tokens in told.reused.items():
        assert found["tiercel_reused_tokens_total", place] == tokens
    assert found["tiercel_prompt_tokens_total",] == told.prompt
    assert found["tiercel_saved_prefill_seconds_total",] == pytest.approx(told.saved_s)
    assert found["tiercel_time_to_first_token_seconds_count", "store"] == len(told.first_s["store"])

    def latest() -> dict[str, Any]:
        totals = site.ask("/v1/history").json()["totals"]
        return {name: column[-1] for name, column in totals.items()}

    assert eventually(lambda: latest().get("requests") == REQUESTS)
    assert latest()["reused_tokens"] == told.reused.total()
    assert latest()["ttft_none"] == len(told.first_s["none"])
    page = opened(browser, site.url)
    says(page, "#tile-reused", f"{REQUESTS} requests")
    assert page.inner_text("#tile-reused b") == f"{round(100 * told.reused.total() / told.prompt)} %"
    mean_ms = 1000 * sum(told.first_s["store"]) / len(told.first_s["store"])
    shown = page.inner_text("#tile-ttft b").split()
    assert float(shown[0]) * (1 if shown[1] == "ms" else 1000) == pytest.approx(mean_ms, rel=0.05)
    assert page.inner_text("#tile-spent b") == "50 s"
    page.close()
