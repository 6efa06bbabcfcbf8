"""Keys: equal exactly when model, weights, layout, tenant and every token and picture before are equal."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.blocks import KEY_BYTES, Chain, Identity, Media, Scope
from tiercel.blocks.framing import Field, frame
from tiercel.errors import RequestError

IDENTITY = Identity(
    "org/model", "rev-1", "bfloat16", b"geometry", "hf/1", 4, 0, 2, b"scales", "int8 bfloat16:64"
)
TOKENS = list(range(100, 120))
FIELDS = st.one_of(st.none(), st.text(max_size=4), st.binary(max_size=4), st.integers(-300, 300))


@settings(max_examples=2_000)
@given(st.lists(FIELDS, max_size=4), st.lists(FIELDS, max_size=4))
def test_no_two_field_lists_are_framed_alike(one: list[Field], other: list[Field]) -> None:
    """D05."""
    same = [(type(field), field) for field in one] == [(type(field), field) for field in other]
    assert (frame(*one) == frame(*other)) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "bc"), ("ab", "c")),
        (("1",), (1,)),
        (("a",), (b"a",)),
        ((None,), ("",)),
        ((None, "x"), ("x", None)),
    ],
)
def test_neighbouring_fields_are_not_confused(one: tuple[Field, ...], other: tuple[Field, ...]) -> None:
    assert frame(*one) != frame(*other)


def test_ten_thousand_scopes_share_no_root() -> None:
    """D05. From a small alphabet, so that parts shift between neighbours often."""
    pick = random.Random(5)

    def text() -> str:
        return "".join(pick.choices("ab", k=pick.randint(1, 3)))

    scopes = {
        Scope(
            Identity(text(), text(), text(), text().encode(), text(), pick.randint(1, 12)),
            pick.choice([None, text().encode()]),
            pick.choice([None, text()]),
        )
        for _ in range(10_000)
    }
    assert len(scopes) > 9_000
    assert len({scope.root for scope in scopes}) == len({scope.tag for scope in scopes}) == len(scopes)


def test_an_adapter_named_like_a_salt_is_not_that_salt() -> None:
    """D02, D05."""
    scopes = [
        Scope(IDENTITY),
        Scope(IDENTITY, adapter=b"X"),
        Scope(IDENTITY, salt="X"),
        Scope(IDENTITY, adapter=b"X", salt="X"),
        Scope(IDENTITY, adapter=b"Y"),
        Scope(IDENTITY, adapter=b""),
        Scope(IDENTITY, salt=""),
    ]
    keys = {one.chain(TOKENS).keys for one in scopes}
    assert len(keys) == len(scopes)
    assert Scope(IDENTITY).chain(TOKENS).keys in keys, "the control: equal scopes give equal keys"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Identity)])
def test_every_field_of_the_identity_matters(name: str) -> None:
    """D01, D04, D06."""
    value = getattr(IDENTITY, name)
    changes: dict[type, Callable[[object], object]] = {
        str: lambda seen: f"{seen}2",
        bytes: lambda seen: b"else",
        int: lambda seen: 1 if seen == 0 else int(str(seen)) + 1,
    }
    changed = dataclasses.replace(IDENTITY, **{name: changes[type(value)](value)})
    base, other = Scope(IDENTITY).chain(TOKENS), Scope(changed).chain(TOKENS)
    assert not set(base.keys) & set(other.keys)
    assert Scope(dataclasses.replace(IDENTITY)).chain(TOKENS) == base, "the control"


@pytest.mark.parametrize("name", ["scales", "lossy"])
def test_scales_or_a_mark_that_appear_change_the_keys(name: str) -> None:
    assert Scope(dataclasses.replace(IDENTITY, **{name: None})).root != Scope(IDENTITY).root


def test_media_change_keys_from_the_first_block_they_touch() -> None:
    """D03."""
    cat, dog = Media(6, 5, b"c" * 16), Media(6, 5, b"d" * 16)
    scope = Scope(IDENTITY)
    plain, with_cat, with_dog = (scope.chain(TOKENS, media).keys for media in ((), (cat,), (dog,)))
    assert plain[:1] == with_cat[:1] == with_dog[:1], "wholly before the picture: shared"
    for index in range(1, 5):
        assert len({plain[index], with_cat[index], with_dog[index]}) == 3
    later = Media(16, 2, b"e" * 16)
    second_turn = scope.chain(TOKENS, (cat, later)).keys
    assert second_turn[:4] == with_cat[:4], "a second picture keeps the prefix through the first"
    assert second_turn[4] != with_cat[4]
    assert scope.chain(TOKENS, (later, cat)).keys == second_turn, "order of listing says nothing"
    assert scope.chain(TOKENS, (Media(6, 4, b"c" * 16),)).keys[1] != with_cat[1]


def test_a_hundred_thousand_pictures_give_as_many_keys() -> None:
    """D08."""
    scope = Scope(dataclasses.replace(IDENTITY, block_tokens=1))
    ids = [number.to_bytes(14, "little") + b"\0\0" for number in range(100_000)]
    assert len({scope.chain([1], (Media(0, 1, digest),)).keys for digest in ids}) == 100_000


@pytest.mark.parametrize(
    ("start", "length", "digest"), [(0, 1, b"x" * 15), (-1, 1, b"x" * 16), (0, 0, b"x" * 16)]
)
def test_media_that_could_collide_or_lie_nowhere_are_refused(start: int, length: int, digest: bytes) -> None:
    """D08."""
    with pytest.raises(RequestError):
        Media(start, length, digest)
    Media(0, 1, b"x" * 16)


SCRIPT = """
from tiercel.blocks import Identity, Media, Scope
identity = Identity("org/model", "rev-1", "bfloat16", b"geometry", "hf/1", 4, 0, 2, b"scales")
scope = Scope(identity, b"lora", "salt")
print(*(key.hex() for key in scope.chain(range(12), [Media(5, 2, b"m" * 16)]).keys))
"""
GOLDEN = """
b9146c80964b3079d99ae3ee70ca976a63d16201833a3c843bd51de5554f4ab6
b9146c80964b3079934cf6c43aa30fbcaff1d41e9484ab560d5f765ef2db3fc6
b9146c80964b30791a7f5029169fdfee8b70b9780de047499f2d448d9dedb747
"""


@pytest.mark.parametrize("seed", [None, "0", "random", "12345"])
def test_every_process_names_blocks_alike_for_ever(seed: str | None) -> None:
    """D07. The golden keys must never change: caches on disk are named by them."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        env["PYTHONHASHSEED"] = seed
    shown = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == GOLDEN.split()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.integers(0, 60))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(tokens: list[int], cut: int) -> None:
    scope = Scope(IDENTITY)
    keys = scope.chain(tokens).keys
    assert len(keys) == len(tokens) // 4
    assert len(set(keys)) == len(keys)
    assert all(len(key) == KEY_BYTES and key.startswith(scope.tag) for key in keys)
    assert scope.chain(tokens[:cut]).keys == keys[: min(cut, len(tokens)) // 4]


@given(st.lists(st.integers(0, 9), min_size=4, max_size=40), st.data())
def test_one_other_token_changes_every_key_from_its_block_on(tokens: list[int], data: st.DataObject) -> None:
    scope = Scope(IDENTITY)
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    one, other = scope.chain(tokens).keys, scope.chain(changed).keys
    assert one[: at // 4] == other[: at // 4]
    assert not set(one[at // 4 :]) & set(other)


def test_a_chain_is_cut_to_prefixes_only() -> None:
    whole = Scope(IDENTITY).chain(TOKENS)
    assert whole.prefix(2) == whole[:2] == Chain(whole.root, whole.info, whole.keys[:2])
    assert len(whole[0:3:1]) == 3
    for part in (slice(1, 3), slice(0, 4, 2)):
        with pytest.raises(ValueError):
            whole[part]


@pytest.mark.parametrize("bad", [-1, 2**32, "a", 1.5, None])
def test_what_is_no_token_id_is_refused_in_one_line(bad: object) -> None:
    with pytest.raises(RequestError) as refused:
        Scope(IDENTITY).chain([1, 2, 3, bad])  # type: ignore[list-item]
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change", [{"model": ""}, {"model": "x" * 1025}, {"block_tokens": 0}, {"shard": 2}, {"shard": -1}]
)
def test_a_senseless_identity_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        dataclasses.replace(IDENTITY, **change)


def test_a_salt_is_bounded_and_never_shown() -> None:
    with pytest.raises(RequestError):
        Scope(IDENTITY, salt="x" * 5000)
    assert b"secret-salt" not in Scope(IDENTITY, salt="secret-salt").info


def test_an_odd_but_legal_salt_has_a_name_too() -> None:
    assert Scope(IDENTITY, salt="\ud800").root != Scope(IDENTITY, salt="?").root
