"""Figures of a server: from pages of ours and of vLLM, before and after, and never guessed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.bench.figures import Figures, added, of_page, summed
from tiercel.bench.memory import Peak, descendants, resident_bytes

OURS = """# TYPE tiercel_reused_tokens_total counter
tiercel_reused_tokens_total{place="ram"} 512.0
tiercel_reused_tokens_total{place="disk"} 256.0
tiercel_prompt_tokens_total 2000.0
tiercel_saved_prefill_seconds_total 4.5
tiercel_spent_seconds_total 0.5
tiercel_tier_read_bytes_total{tier="disk"} 1.5e6
tiercel_tier_written_bytes_total{tier="disk"} 3e6
"""
VLLM = """vllm:prefix_cache_hits_total{engine="0",model_name="m"} 128.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 2.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 64.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
"""
FIGURES = st.builds(
    Figures,
    prompt_tokens=st.integers(0, 1000),
    saved_s=st.integers(0, 9),
    spent_s=st.integers(0, 9),
    reused_tokens=st.dictionaries(st.sampled_from("ab"), st.integers(0, 99)),
    read_bytes=st.dictionaries(st.sampled_from("ab"), st.integers(0, 99)),
    written_bytes=st.dictionaries(st.sampled_from("ab"), st.integers(0, 99)),
)


def test_pages_are_read() -> None:
    ours, theirs = of_page(OURS), of_page(VLLM)
    assert ours == Figures(
        prompt_tokens=2000, saved_s=4.5, spent_s=0.5, reused_tokens={"ram": 512, "disk": 256},
        read_bytes={"disk": 1.5e6}, written_bytes={"disk": 3e6},
    )  # fmt: skip
    assert theirs == Figures(prompt_tokens=1000, reused_tokens={"engine": 130, "connector": 64})


@pytest.mark.parametrize("page", ["", "up 1\n", "tiercel_reused_tokens_total{", "<html>", "\x00"])
def test_pages_without_figures_tell_nothing(page: str) -> None:
    assert of_page(page) is None


@given(FIGURES, FIGURES)
def test_what_was_added_and_what_was_there_is_what_there_is(before: Figures, more: Figures) -> None:
    after = summed([before, more])
    assert after is not None
    found = added(before, after)
    assert found is not None
    assert summed([before, found]) == after


def test_a_restart_or_a_missing_page_is_not_guessed() -> None:
    small, large = Figures(prompt_tokens=1), Figures(prompt_tokens=5)
    assert added(small, large) == Figures(prompt_tokens=4)
    assert added(large, small) is None
    assert added(Figures(saved_s=2), Figures(saved_s=1)) is None
    assert added(Figures(read_bytes={"a": 2}), Figures(read_bytes={"a": 1})) is None
    assert added(None, large) is None
    assert summed([large, None]) is None
    assert summed([]) is None


def test_memory_of_a_process_and_what_it_starts_is_seen() -> None:
    start = "subprocess.run([sys.executable, '-c', 'input()'])"
    code = f"import subprocess, sys; block = bytearray(80 << 20); {start}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        while len(descendants([child.pid])) < 2:
            assert child.poll() is None
        with Peak(lambda: [child.pid]) as peak:
            while (peak.host_bytes or 0) < 80 << 20:
                assert child.poll() is None
        child.kill()
    assert peak.host_bytes is not None
    assert 80 << 20 <= peak.host_bytes < 400 << 20
    assert peak.gpu_bytes is None
    assert resident_bytes([child.pid]) is None
    assert resident_bytes([os.getpid()])
