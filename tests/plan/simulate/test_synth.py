"""Synthetic traces: deterministic, valid, and of the shape that was asked for."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tiercel.errors import ConfigError
from tiercel.plan.simulate import Shape, Trace, read_trace, synthesize, write_trace

SMALL = Shape(requests=2000, document_tokens=2048, system_tokens=1000)


def text(shape: Shape) -> str:
    stream = io.StringIO()
    write_trace(stream, shape)
    return stream.getvalue()


def made(tmp_path: Path, shape: Shape) -> Trace:
    path = tmp_path / "synth.jsonl"
    path.write_text(text(shape))
    return read_trace(path)


def test_same_seed_same_bytes() -> None:
    assert text(SMALL) == text(SMALL)
    assert text(SMALL) != text(replace(SMALL, seed=1))


def test_a_synthetic_trace_reads_back_and_is_a_chain(tmp_path: Path) -> None:
    trace = made(tmp_path, SMALL)
    assert trace.request_count == 2000
    assert not trace.rechained
    assert trace.block_tokens == 512
    assert (np.diff(trace.arrival_s) >= 0).all()


def test_rate_and_lengths_come_out_as_asked(tmp_path: Path) -> None:
    shape = Shape(requests=20_000, rate_per_s=10, turns=1, document_share=0, system_tokens=0)
    trace = made(tmp_path, shape)
    assert trace.request_count / trace.duration_s == pytest.approx(10, rel=0.05)
    assert trace.input_tokens.mean() == pytest.approx(800, rel=0.05)
    assert trace.output_tokens.mean() == pytest.approx(300, rel=0.05)


def test_nothing_shared_means_no_hits_and_sharing_means_some(tmp_path: Path) -> None:
    nothing = replace(SMALL, turns=1, document_share=0, system_tokens=0)
    assert made(tmp_path, nothing).block_hit_ratio_max == 0
    assert made(tmp_path, replace(nothing, document_share=1)).block_hit_ratio_max > 0.5
    assert made(tmp_path, replace(nothing, turns=5)).block_hit_ratio_max > 0.3


def test_a_larger_exponent_makes_fewer_documents_popular(tmp_path: Path) -> None:
    shape = Shape(requests=2000, turns=1, document_share=1, documents=500, system_tokens=0)
    flat, steep = (made(tmp_path, replace(shape, zipf=z)).block_count for z in (0.0, 2.0))
    assert steep < flat


def test_turns_repeat_what_was_before() -> None:
    sessions: dict[int, list[int]] = {}
    for request in synthesize(replace(SMALL, requests=500)):
        before = sessions.get(request.session, [])
        full = before[:-1]  # the incomplete block at the end does not come back
        assert request.hash_ids[: len(full)] == full
        sessions[request.session] = request.hash_ids
    assert max(len(ids) for ids in sessions.values()) > 5


def test_contexts_are_bounded() -> None:
    shape = Shape(requests=1000, turns=50, turn_tokens=3000, context_tokens_max=20_000)
    assert max(request.input_length for request in synthesize(shape)) <= 20_000


def test_idle_gaps_separate_turns() -> None:
    for idle_s in (0.0, 100.0):
        last: dict[int, int] = {}
        gaps = []
        for request in synthesize(replace(SMALL, idle_s=idle_s)):
            if request.session in last:
                gaps.append(request.timestamp - last[request.session])
            last[request.session] = request.timestamp
        # Long gaps are cut off by the end of the trace, so the mean comes out a little short.
        assert np.mean(gaps) / 1000 == pytest.approx(idle_s, rel=0.25, abs=0.1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"requests": 0}, "requests is 0; accepted: more than 0"),
        ({"rate_per_s": -1.0}, "rate_per_s is -1"),
        ({"turns": 0.5}, "turns is 0.5; accepted: 1 or more"),
        ({"zipf": float("nan")}, "zipf is nan"),
        ({"document_share": 1.5}, "document_share is 1.5; accepted: 0 to 1"),
        ({"documents": 0}, "documents is 0"),
        ({"context_tokens_max": 100}, "context_tokens_max is 100"),
    ],
)
def test_shapes_that_cannot_be(change: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(SMALL, **change)  # type: ignore[arg-type]
