"""What a tier needs, by its kind, and what two of them may not share; each mistake one line that helps."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from tiercel.config import Config, tiers
from tiercel.errors import ConfigError

URL = "valkey://me:secret@host:6379/0"


def load(*given: dict[str, object]) -> Config:
    flags = {f"tiers.{index}.{name}": value for index, one in enumerate(given) for name, value in one.items()}
    return Config.load(environ={}, overrides=flags)


def refusal(*given: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as error:
        load(*given)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)
    return str(error.value)


def test_a_networked_tier_needs_a_url_and_no_size() -> None:
    (tier,) = load({"kind": "valkey", "url": URL}).tiers
    assert (tier.url, tier.path, tier.size_bytes, tier.required, tier.encrypt) == (
        URL,
        None,
        None,
        False,
        None,
    )


def test_a_tier_in_memory_gets_what_ram_lets_go_of_unless_told_otherwise() -> None:
    config = load(
        {"kind": "memory", "size": "1GiB"},
        {"kind": "memory", "size": "2GiB", "write": "through"},
        {"path": "/a", "size": "4GiB"},
    )
    assert [tier.write for tier in config.tiers] == ["on-evict", "through", "through"]
    assert config.host_bytes == config.ram.size_bytes + 3 * 2**30
    assert ("tiers.0.write", "on-evict", "default") in [
        (one.key, one.value, one.origin) for one in config.rows()
    ]


def test_a_password_is_shown_nowhere() -> None:
    config = load({"kind": "valkey", "url": URL})
    assert "secret" not in repr(config) + "\n".join(config.describe())
    assert "tiers.0.url = valkey://me:***@host:6379/0" in "\n".join(config.describe())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kind": "valkye", "url": URL}, "tiers.0.kind: 'valkye' is no kind of tier; did you mean 'valkey'?"),
        (
            {"kind": "disk", "path": "/a"},
            "accepted: files, memory, valkey, objects, mooncake, or the name of an entry",
        ),
        ({"kind": "valkey"}, "tiers.0.url: is missing; accepted: a URL"),
        ({"kind": "valkey", "url": "host:6379"}, "tiers.0.url: 'host:6379' is not accepted; accepted: a URL"),
        ({"kind": "valkey", "url": URL, "path": "/a"}, "tiers.0.path: does not go with kind 'valkey'"),
        ({"path": "/a", "size": "1GB", "url": URL}, "tiers.0.url: does not go with kind 'files'"),
        ({"url": URL}, "accepted: path, or a kind of valkey, objects, mooncake"),
        ({"path": "/a"}, "tiers.0.size: is missing; accepted: a size"),
        ({"kind": "memory"}, "tiers.0.size: is missing; accepted: a size"),
        (
            {"kind": "memory", "size": "1GB", "path": "/a"},
            "tiers.0.path: does not go with kind 'memory'; accepted: size, or a kind of files",
        ),
        (
            {"kind": "memory", "size": "1GB", "url": URL},
            "tiers.0.url: does not go with kind 'memory'; accepted: size, or a kind of valkey",
        ),
        (
            {"kind": "memory", "size": "1GB", "encrypt": "env:KEY"},
            "tiers.0.encrypt: does not go with kind 'memory'; accepted: size, or a kind of files, valkey",
        ),
        ({"size": "1GB"}, "tiers.0.path: is missing; accepted: a path"),
        (
            {"path": "/a", "size": "1GB", "required": "perhaps"},
            "'perhaps' is not accepted; accepted: true or",
        ),
    ],
)
def test_a_tier_that_lacks_something_or_has_too_much_is_refused(given: dict[str, object], says: str) -> None:
    assert says in refusal(given)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (URL, "valkey://other@host:6379/0/?ttl=1d", True),
        (URL, "valkey://host:6379/1", False),
        ("s3://b/p?endpoint=http://a", "s3://b/p?region=x&endpoint=http://a", True),
        ("s3://b/p?endpoint=http://a", "s3://b/p?endpoint=http://b", False),
        ("s3://b/p", "s3://b/q", False),
    ],
)
def test_two_tiers_on_one_place_are_refused(first: str, second: str, shared: bool) -> None:
    kind = "objects" if first.startswith("s3") else "valkey"
    given = [{"kind": kind, "url": first}, {"kind": kind, "url": second}]
    if shared:
        assert "is the place of tier 0; accepted: a place of its own for each tier" in refusal(*given)
    else:
        assert len(load(*given).tiers) == 2


def test_a_kind_of_another_package_is_known_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("tape", "tapes:Tape", tiers.TIER_ENTRY_POINTS)
    monkeypatch.setattr(tiers, "entry_points", lambda group: EntryPoints([entry]))
    assert load({"kind": "tape", "url": "tape://library/7"}).tiers[0].kind == "tape"
    assert "accepted: files, memory, valkey, objects, mooncake, tape, or" in refusal(
        {"kind": "tope2", "url": URL}
    )
