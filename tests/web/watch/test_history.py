"""The ring: bounded, evenly thinned out, exact whatever is left out; and when totals begin anew."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tiercel.web.watch.history import SAMPLES_MAX, TIERS_MAX, History, Sample
from tiercel.web.watch.sample import grew


@given(count=st.integers(0, 60), points=st.integers(1, 80), kept=st.integers(1, 40))
def test_differences_are_exact_whatever_is_left_out(count: int, points: int, kept: int) -> None:
    history = History(kept)
    for at in range(count):
        history.add(Sample(float(at), 0, {"requests": at * 3}))
    told = history.as_json(points)
    assert len(told["at_s"]) <= min(points, kept, count)
    assert told["totals"].get("requests", []) == [3 * at for at in told["at_s"]]
    if count:
        assert told["at_s"][-1] == count - 1
    assert told["at_s"] == sorted(set(told["at_s"]))


def test_what_is_kept_is_bounded() -> None:
    history = History()
    places = {f"tier-{n}": {"used_bytes": 1.0, "blocks": 2.0} for n in range(20)}
    for at in range(SAMPLES_MAX + 50):
        history.add(Sample(float(at), 0, {"requests": 1.0}, places))
    told = history.as_json(SAMPLES_MAX)
    assert len(told["at_s"]) == SAMPLES_MAX
    assert told["at_s"][0] == 50
    assert len(told["places"]) == TIERS_MAX
    assert len(json.dumps(history.as_json())) < 200_000


def test_what_nobody_knew_is_null_and_not_zero() -> None:
    history = History()
    history.add(Sample(1.0, 0, {"requests": 5}, {"ram": {"blocks": 1}}))
    history.add(Sample(2.0, 0))
    history.add(Sample(3.0, 1, {"requests": 0}, {"ram": {"blocks": 0}, "disk": {"blocks": 0}}))
    told = history.as_json()
    assert told["totals"]["requests"] == [5, None, 0]
    assert told["places"]["disk"]["blocks"] == [None, None, 0]
    assert told["epoch"] == [0, 0, 1]


def test_totals_that_fall_are_a_store_that_began_anew() -> None:
    before = Sample(1.0, 0, {"requests": 5, "saved_s": 1.5})
    assert grew(before, Sample(2.0, 0, {"requests": 5, "saved_s": 1.5}))
    assert grew(before, Sample(2.0, 0, {"requests": 6}))
    assert grew(Sample(0.0, 0), before)
    assert not grew(before, Sample(2.0, 0, {"requests": 4, "saved_s": 1.5}))
