"""A made-up outcome for the tests of what is shown: two conversations, one of them with a hostile name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tiercel.demo.outcome import Fact, Gap, Outcome, Span, Turn

HOSTILE = "<script>alert(1)</script>"
_FIRST = Turn(
    lane=0, name="One", number=1, restarted=False, prompt_tokens=1000, reused_tokens=0, expected_tokens=0,
    blocks={}, bytes_ram=0, bytes_disk=0, stored_blocks=3, ttft_s=2.0, load_s=0.0, decode_s=0.7, store_s=0.2,
    settle_s=0.1, question="What?", answer="That <b>is</b> it & more",
)  # fmt: skip


def make_turn(**changes: Any) -> Turn:
    return msgspec.structs.replace(_FIRST, **changes)


@pytest.fixture
def outcome() -> Outcome:
    resumed = {
        "number": 2,
        "reused_tokens": 768,
        "ttft_s": 0.1,
        "load_s": 0.04,
        "cold_s": 2.5,
        "same_answer": True,
    }
    return Outcome(
        conversations=("One", HOSTILE),
        turns=(
            make_turn(),
            make_turn(lane=1, name=HOSTILE),
            make_turn(**resumed, blocks={"ram": 3}, bytes_ram=3000),
            make_turn(**resumed, lane=1, name=HOSTILE, blocks={"ram": 1, "disk": 2}, bytes_disk=2048),
            make_turn(**{**resumed, "number": 3}, restarted=True, blocks={"disk": 3}, bytes_disk=3072),
        ),
        spans=(
            Span(0, 1, "prefill", 0.0, 2.0, "One, turn 1: 1,000 tokens computed in 2.000 s"),
            Span(1, 1, "prefill", 2.5, 4.5, f"{HOSTILE}, turn 1: 1,000 tokens computed in 2.000 s"),
            Span(0, 2, "ram", 5.0, 5.04, "One, turn 2: 768 tokens restored from RAM in 0.040 s"),
            Span(1, 2, "disk", 8.0, 8.04, f"{HOSTILE}, turn 2: 768 tokens restored from disk in 0.040 s"),
            Span(0, 3, "disk", 20.0, 20.04, "One, turn 3: 768 tokens restored from disk in 0.040 s"),
        ),
        gaps=(Gap("restart", 12.0, 19.0, "restart: new process, model loaded: 7.0 s"),),
        facts=(Fact("cores", "2 usable by this process"),),
        notes=(f"{HOSTILE} was noted",),
        problems=(),
    )  # fmt: skip
