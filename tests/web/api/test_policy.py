"""A policy of attention is seen by whoever looks: in the name that is shown, and in the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.web.api.conftest import NAME, Stub

from tiercel.web.api.metrics import Metrics


@dataclass
class Figures:
    name: str = "landmark"
    share: float = 0.25
    steps: int = 7
    moved_bytes: int = 4096
    device_peak_bytes: int = 9000


def test_the_name_that_is_shown_says_what_is_not_exact(make_stub: Callable[..., Stub]) -> None:
    assert make_stub().service.loaded.facts.shown == NAME
    shown = make_stub(lossy=("int8", "landmark@0.25")).service.loaded.facts.shown
    assert shown == f"{NAME} (int8, landmark@0.25)"


def test_metrics_say_what_answers_read_and_what_that_moved(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub()
    plain = stub.client.get("/metrics").text
    assert 'tiercel_attention_share{policy="full"} 1.0' in plain
    assert "tiercel_attention_moved_bytes_total 0.0" in plain
    store: Any = stub.store
    text = Metrics(store, 3, Figures()).text().decode()
    for line in (
        'tiercel_attention_share{policy="landmark"} 0.25',
        "tiercel_attention_steps_total 7.0",
        "tiercel_attention_moved_bytes_total 4096.0",
        "tiercel_attention_device_peak_bytes 9000.0",
    ):
        assert line in text
