"""Ranks: what each holds, what is copied, and how many distinct shards a store keeps."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.errors import ConfigError
from tiercel.geometry import KVGeometry, kv_dtype
from tiercel.geometry.engines import as_stored
from tiercel.plan.parallel import Parallel, RankShare, check_parallel, rank_share, stage_sizes

FIXTURES = Path(__file__).parents[1] / "geometry" / "fixtures"
BF16 = kv_dtype("bfloat16")


def share_of(model: str, parallel: Parallel, tokens: int = 32_768, batch: int = 1) -> RankShare:
    geometry = KVGeometry.from_config(FIXTURES / f"{model}.json")
    return rank_share(as_stored(geometry, "exact", BF16, parallel.tp), tokens, batch, BF16, parallel)


# The figures of vLLM's own specifications under tensor and pipeline parallelism.
@pytest.mark.parametrize(
    ("model", "parallel", "per_token", "state", "copies", "shards"),
    [
        ("Qwen--Qwen3-8B", Parallel(tp=8), 18_432, 0, 1, 8),
        ("Qwen--Qwen3-235B-A22B", Parallel(tp=8), 48_128, 0, 2, 4),
        ("Qwen--Qwen3-235B-A22B", Parallel(tp=16), 48_128, 0, 4, 4),
        ("deepseek-ai--DeepSeek-V3", Parallel(tp=8), 70_272, 0, 8, 1),
        ("tiiuae--Falcon-H1-7B", Parallel(tp=4), 22_528, 34_940_928, None, 4),
        ("Qwen--Qwen3.5-27B", Parallel(tp=4), 16_384, 38_486_016, 1, 4),
        ("Qwen--Qwen3-8B", Parallel(pp=4), 36_864, 0, 1, 4),
    ],
)  # fmt: skip
def test_ranks(
    model: str, parallel: Parallel, per_token: int, state: int, copies: int | None, shards: int
) -> None:
    share = share_of(model, parallel)
    one = share_of(model, Parallel())
    assert share.bytes_per_token == per_token
    assert share.fixed_state_bytes == state
    assert share.distinct_shards == shards
    if copies is not None:
        assert share.all_ranks_bytes == copies * one.all_ranks_bytes


def test_one_kv_head_is_copied_on_every_rank() -> None:
    share = share_of("google--gemma-3-1b-text", Parallel(tp=4))
    assert share.bytes_per_token + share.window_bytes_per_token == 26_624
    assert share.distinct_shards == 1


def test_context_parallelism_divides_tokens_and_copies_windows() -> None:
    share = share_of("deepseek-ai--DeepSeek-V3", Parallel(cp=8))
    assert share.bytes_per_token == Fraction(70_272, 8)
    assert share.all_ranks_bytes == share_of("deepseek-ai--DeepSeek-V3", Parallel()).all_ranks_bytes
    assert share.distinct_shards == 8
    gemma = share_of("google--gemma-3-27b-text", Parallel(cp=2))
    assert gemma.window_bytes_per_token == 425_984
    assert gemma.bytes_per_token == 40_960


def test_tokens_are_divided_upwards() -> None:
    assert share_of("Qwen--Qwen3-8B", Parallel(cp=4), tokens=5).total_bytes == 2 * 147_456


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [
        (36, 4, (9, 9, 9, 9)),
        (61, 4, (15, 15, 16, 15)),
        (62, 4, (15, 16, 16, 15)),
        (5, 5, (1,) * 5),
        (3, 2, (2, 1)),
    ],
)
def test_stages(layers: int, pp: int, expected: tuple[int, ...]) -> None:
    assert stage_sizes(layers, pp) == expected


@given(st.integers(1, 500), st.integers(1, 64))
def test_stages_cover_all_layers_evenly(layers: int, pp: int) -> None:
    sizes = stage_sizes(layers, pp)
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1


@given(
    st.sampled_from(sorted(FIXTURES.glob("*.json"))),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 100_000),
)
def test_all_ranks_hold_at_least_one_copy(path: Path, tp: int, pp: int, cp: int, tokens: int) -> None:
    geometry = KVGeometry.from_config(path)
    parallel = Parallel(tp, pp, cp)
    try:
        check_parallel(geometry, parallel)
    except ConfigError:
        return
    share = rank_share(as_stored(geometry, "exact", BF16, tp), tokens, 1, BF16, parallel)
    one = geometry.sequence_bytes(tokens)
    assert share.all_ranks_bytes >= one - pp
    assert one <= share.total_bytes * share.distinct_shards + pp * share.distinct_shards
    assert share.total_bytes * parallel.ranks >= share.all_ranks_bytes - parallel.ranks


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        (Parallel(tp=3), "--tp: 3; accepted: a divisor or a multiple of the 8 KV heads"),
        (Parallel(tp=0), "--tp: 0"),
        (Parallel(pp=37), "--pp: 37; accepted: at most the 36 layers"),
        (Parallel(cp=-1), "--cp: -1"),
    ],
)
def test_widths_that_do_not_fit_are_refused(parallel: Parallel, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        share_of("Qwen--Qwen3-8B", parallel)
