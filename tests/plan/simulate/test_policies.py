"""Hit counts against simulators that are too simple to be wrong, and against published figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.plan.simulate import POLICIES, join_runs, policy_hits
from tiercel.plan.simulate.summary import capacity_for_shares
from tiercel.plan.simulate.trace import Trace

Make = Callable[..., Trace]
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=25)
CAPACITIES = st.lists(st.integers(0, 20), min_size=1, max_size=4)


def chains(trace: Trace) -> list[list[int]]:
    return [trace.blocks[a:b].tolist() for a, b in pairwise(trace.offsets.tolist())]


def leading(chain: Sequence[int], cache: Sequence[int] | set[int]) -> int:
    for position, block in enumerate(chain):
        if block not in cache:
            return position
    return len(chain)


def simple_lru(trace: Trace, capacity: int, *, leaf_first: bool) -> int:
    stack: list[int] = []  # most recent first
    hits = 0
    for chain in chains(trace):
        hits += leading(chain, stack)
        for block in reversed(chain) if leaf_first else chain:
            if block in stack:
                stack.remove(block)
            stack.insert(0, block)
        del stack[capacity:]
    return hits


def simple_fifo(trace: Trace, capacity: int) -> int:
    queue: list[int] = []
    hits = 0
    for chain in chains(trace):
        hits += leading(chain, queue)
        missing = [block for block in reversed(chain) if block not in queue]
        queue = (queue + missing)[-capacity:] if capacity else []
    return hits


def simple_s3fifo(trace: Trace, capacity: int) -> int:
    if not capacity:
        return 0
    small_max = max(1, capacity // 10)
    ghost_max = capacity - small_max
    small: list[int] = []  # newest first
    main: list[int] = []
    left: list[int] = []  # everything that ever left the small queue, newest first; None once forgiven
    uses: dict[int, int] = {}
    hits = 0

    def evict() -> None:
        if len(small) < small_max or not evict_small():
            while main:
                block = main.pop()
                if not uses[block]:
                    return
                uses[block] -= 1
                main.insert(0, block)
            evict_small()

    def evict_small() -> bool:
        while small:
            block = small.pop()
            if uses[block] < 2:
                left.insert(0, block)
                return True
            uses[block] = 0
            main.insert(0, block)
        return False

    for chain in chains(trace):
        cached = set(small) | set(main)
        hits += leading(chain, cached)
        for block in cached & set(chain):
            uses[block] = min(3, uses[block] + 1)
        for block in [b for b in reversed(chain) if b not in cached]:
            if len(small) + len(main) == capacity:
                evict()
            remembered = block in left[:ghost_max]
            left[:] = [-1 if b == block else b for b in left]
            (main if remembered else small).insert(0, block)
            uses[block] = 0
    return hits


def exhaustive_optimum(trace: Trace, capacity: int) -> int:
    """The best over every choice of what to keep after every request."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for chain in chains(trace):
        following: dict[frozenset[int], int] = {}
        for cache, hits in best.items():
            now = hits + leading(chain, set(cache))
            pool = sorted(cache | set(chain))
            for size in range(min(capacity, len(pool)) + 1):
                for kept in combinations(pool, size):
                    key = frozenset(kept)
                    following[key] = max(following.get(key, 0), now)
        best = following
    return max(best.values())


def blocks(name: str, trace: Trace, capacities: Sequence[int]) -> list[int]:
    return [hit.blocks for hit in policy_hits(name, trace, join_runs(trace), capacities)]


@given(prompts=PROMPTS, capacities=CAPACITIES)
def test_prefix_lru_equals_a_list_kept_in_order_of_use(make_trace: Make, prompts, capacities) -> None:
    trace = make_trace(prompts)
    assert blocks("tiercel", trace, capacities) == [simple_lru(trace, c, leaf_first=True) for c in capacities]


@given(prompts=PROMPTS, capacities=CAPACITIES)
def test_lru_equals_a_list_kept_in_order_of_use(make_trace: Make, prompts, capacities) -> None:
    trace = make_trace(prompts)
    assert blocks("lru", trace, capacities) == [simple_lru(trace, c, leaf_first=False) for c in capacities]


@given(prompts=PROMPTS, capacities=CAPACITIES)
def test_fifo_equals_a_list(make_trace: Make, prompts, capacities) -> None:
    trace = make_trace(prompts)
    assert blocks("fifo", trace, capacities) == [simple_fifo(trace, c) for c in capacities]


@given(prompts=PROMPTS, capacities=CAPACITIES)
def test_s3fifo_equals_three_lists(make_trace: Make, prompts, capacities) -> None:
    trace = make_trace(prompts)
    assert blocks("s3-fifo", trace, capacities) == [simple_s3fifo(trace, c) for c in capacities]


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=7),
    capacity=st.integers(0, 4),
)
def test_optimum_equals_the_best_of_all_choices(make_trace: Make, prompts, capacity) -> None:
    trace = make_trace(prompts)
    assert blocks("opt", trace, [capacity]) == [exhaustive_optimum(trace, capacity)]


@given(prompts=PROMPTS, capacity=st.integers(0, 20))
def test_no_policy_beats_the_optimum(make_trace: Make, prompts, capacity) -> None:
    trace = make_trace(prompts)
    bound = blocks("opt", trace, [capacity])[0]
    for name in POLICIES:
        assert blocks(name, trace, [capacity])[0] <= bound


@given(prompts=PROMPTS)
@pytest.mark.parametrize("name", ["tiercel", "lru", "opt"])
def test_more_capacity_never_hits_less(make_trace: Make, prompts, name: str) -> None:
    hits = blocks(name, make_trace(prompts), range(30))
    assert hits == sorted(hits)


def test_fifo_may_hit_less_with_more_capacity(make_trace: Make) -> None:
    # Belady's anomaly: the property above is one of LRU and the optimum, not of counting.
    trace = make_trace([[x] for x in (1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5)])
    assert blocks("fifo", trace, [3, 4]) == [3, 2]


@given(prompts=PROMPTS)
@pytest.mark.parametrize("name", list(POLICIES))
def test_unbounded_caches_hit_all_but_first_uses(make_trace: Make, prompts, name: str) -> None:
    trace = make_trace(prompts)
    assert blocks(name, trace, [10_000]) == [len(trace.blocks) - trace.block_count]


@given(prompts=PROMPTS, capacity=st.integers(0, 20), last=st.integers(1, 4))
@pytest.mark.parametrize("name", list(POLICIES))
def test_tokens_of_an_incomplete_block_count_as_they_are(make_trace, prompts, capacity, last, name) -> None:
    # Only whole prompts end in an incomplete block, so full and incomplete counts differ by those hit whole.
    full = make_trace(prompts)
    short = make_trace(prompts, last_block_tokens=last)
    hit = policy_hits(name, short, join_runs(short), [capacity])[0]
    same = policy_hits(name, full, join_runs(full), [capacity])[0]
    assert hit.blocks == same.blocks
    assert same.tokens == 4 * same.blocks
    assert 0 <= same.tokens - hit.tokens <= (4 - last) * len(prompts)


def test_tokens_of_a_prompt_hit_whole(make_trace: Make) -> None:
    trace = make_trace([[1, 2], [1, 2], [1, 3]], last_block_tokens=3)
    for name in POLICIES:
        hit = policy_hits(name, trace, join_runs(trace), [10])[0]
        assert (hit.blocks, hit.tokens) == (3, 7 + 4)


@given(prompts=PROMPTS)
def test_runs_hold_every_reference_once(make_trace: Make, prompts) -> None:
    trace = make_trace(prompts)
    for most in (None, 1, 2):
        runs = join_runs(trace, run_blocks_max=most)
        assert int(runs.weights.sum()) == trace.block_count
        assert int(runs.weights[runs.refs].sum()) == len(trace.blocks)
        assert most is None or runs.weights.max(initial=0) <= most


# The published trace: figures measured once by an independent prototype.


def test_published_trace_has_an_infinite_hit_ratio_of_36_6_percent(published_trace: Trace) -> None:
    assert len(published_trace.blocks) == 288_500
    assert published_trace.block_count == 182_790
    assert round(100 * published_trace.block_hit_ratio_max, 1) == 36.6


@pytest.mark.parametrize(
    ("share", "million_tokens"), [(0.5, 4.2), (0.75, 9.1), (0.9, 16.1), (0.95, 19.3), (0.99, 43.6)]
)
def test_published_trace_lru_curve(published_trace: Trace, share: float, million_tokens: float) -> None:
    capacity = int(million_tokens * 1e6 / 512)
    best = len(published_trace.blocks) - published_trace.block_count
    assert blocks("tiercel", published_trace, [capacity])[0] / best == pytest.approx(share, abs=0.01)


def test_published_trace_capacities_of_shares(published_trace: Trace) -> None:
    runs = join_runs(published_trace)
    rows = capacity_for_shares(
        published_trace, lambda sizes: policy_hits("tiercel", published_trace, runs, sizes), None
    )
    found = [row["capacity_tokens"] / 1e6 for row in rows]
    assert found == pytest.approx([4.2, 9.1, 16.1, 19.3, 43.6], rel=0.015)


def test_published_trace_policies_are_ordered(published_trace: Trace) -> None:
    hits = {name: blocks(name, published_trace, [6250])[0] for name in POLICIES}
    assert hits["opt"] > hits["s3-fifo"] > hits["tiercel"] >= hits["lru"] > hits["fifo"]
