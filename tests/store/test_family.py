"""What prompts share is told apart, against a tree that is kept in full."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercel.blocks import BlockKey
from tiercel.store.family import Family

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12)


def keys_of(path: list[int]) -> list[BlockKey]:
    """A key names its whole path, as a hash chain does."""
    return [BlockKey(bytes(path[: depth + 1]).ljust(32, b"-")) for depth in range(len(path))]


@given(PATHS, st.data())
def test_a_chains_own_blocks_are_those_no_other_chain_begins_with(
    paths: list[list[int]], data: st.DataObject
) -> None:
    family, tree = Family(), set[BlockKey]()
    for path in paths:
        family.note(keys_of(path))
        tree |= set(keys_of(path))
    gone = data.draw(st.sets(st.sampled_from(sorted(tree))))
    # A block without its parent is as good as gone.
    cached = {
        key for path in paths for key in keys_of(path) if not gone & set(keys_of(path[: depth_of(key)]))
    }
    mine = data.draw(st.sampled_from(paths))
    keys = keys_of(mine)
    others = [keys_of(path) for path in paths if path[: len(mine)] != mine]
    shared = {key for other in others for key in other if _goes_on(other, key, keys, cached)}
    own = [key for key in keys if key not in shared]
    after = {key for path in paths for key in keys_of(path)[len(mine) :] if path[: len(mine)] == mine}
    found = family.own_and_after(keys, cached.__contains__)
    assert found[: len(own)] == own
    assert set(found[len(own) :]) == (after & cached if own else set())
    assert set(family.own(keys, cached.__contains__)) <= {*own, *after}


def depth_of(key: BlockKey) -> int:
    return len(key.rstrip(b"-"))


def _goes_on(other: list[BlockKey], key: BlockKey, keys: list[BlockKey], cached: set[BlockKey]) -> bool:
    """Whether another chain has `key` and, right behind where it leaves ours, a cached block."""
    common = sum(1 for mine, theirs in zip(keys, other, strict=False) if mine == theirs)
    return key in other[:common] and len(other) > common and other[common] in cached


def test_it_forgets_the_oldest_parents_and_keeps_a_few_children_each() -> None:
    family = Family(parents_max=10)
    for number in range(50):
        family.note(keys_of([number, 1]))
    assert len(family) == 10
    assert family.own(keys_of([49, 2]), lambda key: True) == keys_of([49, 2])[1:]
    assert family.own(keys_of([0, 2]), lambda key: True) == keys_of([0, 2]), "not known any more"
    for number in range(50):
        family.note(keys_of([60, number]))
    assert family.own(keys_of([60, 49]), lambda key: True) == keys_of([60, 49])[1:]
    assert len(family._children[keys_of([60])[0]]) == 8
