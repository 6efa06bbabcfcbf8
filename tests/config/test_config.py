"""One configuration from file < environment < flags, in which no setting is silently ignored (row D41)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.config import Config
from tiercel.config.schema import TIERS, entries
from tiercel.config.sources import variable_of
from tiercel.errors import ConfigError

GIB = 2**30
# A setting and a value it accepts that is not its default; of every setting, by the test below.
LEGAL: dict[str, str] = {
    "ram.size": "3GiB",
    "ram.kind": "shared",
    "ram.reserved_slots": "9",
    "ram.slot": "5MiB",
    "tiers.0.kind": "files",
    "tiers.0.path": "/elsewhere",
    "tiers.0.url": "valkey://host:6379",
    "tiers.0.size": "5GB",
    "tiers.0.write": "on-evict",
    "tiers.0.write_per_day": "50GB",
    "tiers.0.read_workers": "7",
    "tiers.0.write_workers": "6",
    "tiers.0.deadline": "70ms",
    "tiers.0.required": "true",
    "tiers.0.codec": "lossless",
    "tiers.0.encrypt": "env:KEY",
    "store.read_queue_blocks": "77",
    "store.write_queue_blocks": "78",
    "store.admission": "second-sight",
    "store.load": "always",
    "store.accept_lossy": "report.json",
    "store.load_deadline": "7s",
    "store.flush_deadline": "8s",
    "daemon.socket": "/run/other.sock",
    "serve.host": "0.0.0.0",
    "serve.port": "8123",
    "serve.queue_requests": "3",
    "serve.request_deadline": "2m",
    "serve.max_body": "1MiB",
    "serve.max_answer_tokens": "99",
    "model.dtype": "float32",
    "model.device": "cpu",
    "model.block_tokens": "128",
    "model.kv_device_budget": "256MiB",
    "model.batch": "8",
    "attention.policy": "landmark",
    "attention.budget": "0.1",
    "attention.chunks": "16",
}
TIER_0 = {"tiers.0.path": "/cache", "tiers.0.size": "1GB"}


def load(
    tmp_path: Path,
    toml: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    path = None
    if toml is not None:
        path = tmp_path / "tiercel.toml"
        path.write_text(toml)
    return Config.load(path, environ or {}, flags or {})


def refusal(
    tmp_path: Path,
    toml: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, toml, environ, flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def keys() -> list[str]:
    return [f"{e.section}.0.{e.name}" if e.section == TIERS else f"{e.section}.{e.name}" for e in entries()]


def effective(config: Config, key: str) -> str:
    return next(line for line in config.describe() if line.startswith(f"{key} = "))


# What is set is applied.


def test_the_list_of_legal_values_covers_every_setting() -> None:
    assert list(LEGAL) == keys()


def test_there_are_fewer_than_forty_settings() -> None:
    assert len(keys()) < 40


@pytest.mark.parametrize("key", LEGAL)
def test_every_setting_is_applied_from_its_variable(tmp_path: Path, key: str) -> None:
    config = load(tmp_path, environ={variable_of(key): LEGAL[key]}, flags=others_than(key))
    assert effective(config, key).split("  ")[0] == f"{key} = {LEGAL[key]}"
    assert effective(config, key).endswith(f"(environment {variable_of(key)})")


@pytest.mark.parametrize("key", LEGAL)
def test_every_setting_is_applied_from_a_flag(tmp_path: Path, key: str) -> None:
    config = load(tmp_path, flags={**others_than(key), key: LEGAL[key]})
    assert effective(config, key).split("  ")[0] == f"{key} = {LEGAL[key]}"
    assert effective(config, key).endswith("(flag)")


@pytest.mark.parametrize("key", LEGAL)
def test_every_setting_is_applied_from_the_file(tmp_path: Path, key: str) -> None:
    name = key.rsplit(".", 1)[1]
    header = "[[tiers]]" if key.startswith("tiers.") else f"[{key.split('.')[0]}]"
    config = load(tmp_path, f'{header}\n{name} = "{LEGAL[key]}"\n', flags=others_than(key))
    assert effective(config, key).split("  ")[0] == f"{key} = {LEGAL[key]}"


def others_than(key: str) -> dict[str, object]:
    """What must be set so that `key` may be."""
    if key == "tiers.0.url":
        return {"tiers.0.kind": "valkey"}
    if key == "attention.budget":
        return {"attention.policy": "landmark"}
    return {k: v for k, v in TIER_0.items() if k != key}


def test_without_any_source_the_defaults_hold_and_say_so(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config == Config()
    assert config.ram.size_bytes == 2 * GIB
    assert config.tiers == ()
    assert all(line.endswith("(default)") for line in config.describe())


def test_flags_override_environment_overrides_file(tmp_path: Path) -> None:
    toml = '[ram]\nsize = "1GiB"\nkind = "shared"\nreserved_slots = 5\n'
    environ = {"TIERCEL_RAM_SIZE": "2GiB", "TIERCEL_RAM_RESERVED_SLOTS": "6"}
    config = load(tmp_path, toml, environ, {"ram.size": "3GiB"})
    assert (config.ram.size_bytes, config.ram.reserved_slots, config.ram.kind) == (3 * GIB, 6, "shared")


def test_a_flag_that_was_not_given_overrides_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, environ={"TIERCEL_SERVE_PORT": "81"}, flags={"serve.port": None}).serve.port == 81


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    assert load(tmp_path, environ={"TIERCEL_SERVE_PORT": ""}).serve.port == 8000


def test_the_file_named_by_the_environment_is_read(tmp_path: Path) -> None:
    path = tmp_path / "named.toml"
    path.write_text("[serve]\nport = 9\n")
    assert Config.load(environ={"TIERCEL_CONFIG": str(path)}).serve.port == 9


def test_variables_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    environ = {"PATH": "/bin", "TIER_SIZE": "4", "PARTICLE_RAM_SIZE": "4", "TIERCEL_CACHE_DIR": "/x"}
    assert load(tmp_path, environ=environ) == Config()


def test_a_relative_path_in_a_file_starts_at_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, '[[tiers]]\npath = "blocks"\nsize = "1GB"\n')
    assert config.tiers[0].path == tmp_path / "blocks"


def test_tiers_keep_their_order_and_a_variable_can_add_one(tmp_path: Path) -> None:
    toml = '[[tiers]]\npath = "/a"\nsize = "1GB"\n[[tiers]]\npath = "/b"\nsize = "2GB"\n'
    environ = {"TIERCEL_TIERS_2_PATH": "/c", "TIERCEL_TIERS_2_SIZE": "3GB", "TIERCEL_TIERS_0_WRITE": "off"}
    config = load(tmp_path, toml, environ)
    assert [str(tier.path) for tier in config.tiers] == ["/a", "/b", "/c"]
    assert [tier.write for tier in config.tiers] == ["off", "through", "through"]


# What is misspelt is refused, with the nearest known name (D41).


@pytest.mark.parametrize(
    ("toml", "named", "suggested"),
    [
        ('[ram]\nsiz = "4GiB"\n', "ram.siz", "'ram.size'"),
        ('[ram]\nsize_bytes = "4GiB"\n', "ram.size_bytes", "'ram.size'"),
        ('[rams]\nsize = "4GiB"\n', "rams", "'ram'"),
        ('size = "4GiB"\n', "size", "'ram.size'"),
        ("[model]\nblock_token = 8\n", "model.block_token", "'model.block_tokens'"),
        ('[[tiers]]\npth = "/a"\nsize = "1GB"\n', "tiers.0.pth", "'tiers.0.path'"),
        ("[ram]\nzzz = 1\n", "ram.zzz", "ram.kind, ram.reserved_slots, ram.size"),
        ("[zzz]\na = 1\n", "zzz", "[ram]"),
    ],
)
def test_d41_an_unknown_key_in_the_file_is_refused(
    tmp_path: Path, toml: str, named: str, suggested: str
) -> None:
    message = refusal(tmp_path, toml)
    assert message.startswith(f"file {tmp_path / 'tiercel.toml'}: {named}: unknown setting")
    assert suggested in message


@pytest.mark.parametrize(
    ("variable", "suggested"),
    [
        ("TIERCEL_RAM_BYTES", "TIERCEL_RAM_"),
        ("TIERCEL_RAM_SIZ", "'TIERCEL_RAM_SIZE'"),
        ("TIERCEL_RAM__SIZE", "'TIERCEL_RAM_SIZE'"),
        ("TIERCEL_TIERS_0_PAHT", "'TIERCEL_TIERS_0_PATH'"),
        ("TIERCEL_CONFG", "'TIERCEL_CONFIG'"),
        ("TIERCEL_ram_size", "'TIERCEL_RAM_SIZE'"),
        ("TIERCLE_RAM_SIZE", "'TIERCEL_RAM_SIZE'"),
        ("TIERCELL_SERVE_PORT", "'TIERCEL_SERVE_PORT'"),
        ("tiercel_ram_size", "'TIERCEL_RAM_SIZE'"),
    ],
)
def test_d41_a_misspelt_variable_is_refused(tmp_path: Path, variable: str, suggested: str) -> None:
    message = refusal(tmp_path, environ={variable: "4GiB"})
    assert message.startswith(f"environment: {variable}: unknown variable")
    assert suggested in message


def test_d41_an_unknown_flag_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, flags={"ram.sise": "4GiB"}) == (
        "flag: ram.sise: unknown setting; did you mean 'ram.size'?"
    )


@given(st.sampled_from(keys()), st.data())
def test_d41_any_key_with_one_letter_missing_is_refused(key: str, data: st.DataObject) -> None:
    letters = [i for i, c in enumerate(key) if c.isalpha()]
    cut = data.draw(st.sampled_from(letters))
    misspelt = key[:cut] + key[cut + 1 :]
    with pytest.raises(ConfigError, match="unknown"):
        Config.load(None, {}, {**TIER_0, misspelt: LEGAL[key]})
    assert Config.load(None, {}, {**others_than(key), key: LEGAL[key]}).origins[key] == "flag"


# What is malformed is refused.


@pytest.mark.parametrize("raw", ["4", '"4"', "4.5"])
def test_d41_a_size_without_unit_is_refused(tmp_path: Path, raw: str) -> None:
    message = refusal(tmp_path, f"[ram]\nsize = {raw}\n")
    assert "ram.size: '4" in message
    assert "has no unit; did you mean '4" in message
    assert load(tmp_path, '[ram]\nsize = "4GiB"\n').ram.size_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("ram.size", "-4GiB", "negative"),
        ("ram.size", "1KiB", "too small"),
        ("ram.size", True, "not understood"),
        ("ram.kind", "public", "one of private, shared"),
        ("ram.kind", 3, "one of private, shared"),
        ("ram.reserved_slots", -1, "negative"),
        ("ram.reserved_slots", "0", "too small"),
        ("ram.reserved_slots", "1_0", "not an integer"),
        ("ram.reserved_slots", 2.0, "not an integer"),
        ("ram.reserved_slots", True, "'true' is not an integer"),
        ("store.load_deadline", "0s", "too small"),
        ("store.load_deadline", 10, "did you mean '10s'"),
        ("serve.port", "65536", "from 0 to 65535"),
        ("serve.host", "", "a text"),
        ("tiers.0.path", "", "a path"),
        ("tiers.0.path", ["/a"], "a path"),
        ("tiers.0.path", "a\0b", "a path"),
        ("tiers.0.path", "~nobody-of-this-name/x", "full path"),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_refused(
    tmp_path: Path, key: str, value: object, why: str
) -> None:
    message = refusal(tmp_path, flags={**TIER_0, key: value})
    assert message.startswith(f"flag: {key}: ")
    assert why in message
    assert "accepted:" in message or "give a full path" in message


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[ram\n", "not valid TOML"),
        ("ram = 4\n", "write [ram]"),
        ("tiers = 3\n", "[[tiers]]"),
        ('[tiers]\npath = "/a"\n', "[[tiers]]"),
        ('[[tiers]]\npath = "/a"\n', "tiers.0.size: is missing"),
        ('[[tiers]]\nsize = "1GB"\n', "tiers.0.path: is missing"),
        ('[[tiers]]\npath = "/a"\nsize = "1GB"\n' * 9, "9 tiers"),
        ("[ram.size]\nx = 1\n", "ram.size"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, toml: str, why: str) -> None:
    message = refusal(tmp_path, toml)
    assert message.startswith(f"file {tmp_path / 'tiercel.toml'}: ")
    assert why in message


def test_an_empty_list_of_tiers_means_none(tmp_path: Path) -> None:
    assert load(tmp_path, "tiers = []\n").tiers == ()


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_a_file_from_any_editor(tmp_path: Path, start: bytes, line_end: str) -> None:
    path = tmp_path / "tiercel.toml"
    path.write_bytes(start + line_end.join(["[ram]", 'size = "3GiB"', ""]).encode())
    assert Config.load(path, {}).ram.size_bytes == 3 << 30


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(tmp_path / "absent.toml", {})
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.load(tmp_path / "bytes.toml", {})


# What contradicts itself is refused.


@pytest.mark.parametrize("second", ["/cache", "/cache/", "/cache/x/..", "/cache/inside", "/"])
def test_two_tiers_on_one_directory_are_refused(tmp_path: Path, second: str) -> None:
    flags = {**TIER_0, "tiers.1.path": second, "tiers.1.size": "1GB"}
    message = refusal(tmp_path, flags=flags)
    assert message.startswith("flag: tiers.1.path: ")
    assert "overlaps" in message
    assert len(load(tmp_path, flags={**flags, "tiers.1.path": "/cache2"}).tiers) == 2


def test_two_tiers_on_one_directory_through_a_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    toml = '[[tiers]]\npath = "real"\nsize = "1GB"\n[[tiers]]\npath = "link"\nsize = "1GB"\n'
    assert "overlaps" in refusal(tmp_path, toml)


def test_a_gap_in_the_numbers_of_tiers_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, flags={"tiers.1.path": "/a", "tiers.1.size": "1GB"})
    assert "no tier 0" in message


@pytest.mark.parametrize("key", ["tiers.8.path", "tiers.00.path", "tiers.x.path", "tiers.path"])
def test_a_number_that_is_no_tier_is_refused(tmp_path: Path, key: str) -> None:
    assert "tiers.0.NAME" in refusal(tmp_path, flags={key: "/a"})


# What is shown and documented.


def test_a_password_in_an_address_is_never_shown(tmp_path: Path) -> None:
    address = "valkey://user:hunter2@host/0"
    config = load(tmp_path, flags={"serve.host": address})
    assert "user:***@host" in effective(config, "serve.host")
    assert "hunter2" not in "\n".join(config.describe())
    assert "hunter2" not in refusal(tmp_path, flags={"ram.kind": address})
