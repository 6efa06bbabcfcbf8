"""What LMCache and vLLM were told, as a `tiercel.toml`: right values, nothing dropped, no secrets."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.deploy.manifests import ROOT

from tiercel import cli
from tiercel.config import Config
from tiercel.errors import TiercelError
from tiercel.migrate import (
    Draft,
    Fate,
    Given,
    from_yaml,
    lmcache,
    lmcache_server,
    translate,
    translate_words,
    vllm,
)
from tiercel.tiers.mooncake_url import read_url as read_mooncake
from tiercel.tiers.url import TierUrl
from tiercel.tiers.valkey_url import read_url as read_valkey

GIB = 2**30
YAML = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 60
local_disk: "file:///var/cache/lmcache/"
max_local_disk_size: 500.0
remote_url: "redis://kv:hunter2@cache.example:6380"
remote_serde: "cachegen"
enable_blending: true
enable_p2p: false
chunck_size: 128
extra_config:
  valkey_num_workers: 16
  fancy: 1
"""


def of_yaml(text: str, ranks: int = 1, folder: Path | None = None, **environ: str) -> tuple[Draft, Config]:
    assert folder is not None
    (folder / "lmcache.yaml").write_text(text)
    draft = Draft()
    translate(draft, from_yaml(folder / "lmcache.yaml") + lmcache.from_environ(environ), ranks)
    return draft, loaded(draft, folder)


def of_words(*words: str, folder: Path) -> tuple[Draft, Config]:
    draft = Draft()
    inner = translate_words(draft, words, "tiercel.toml")
    if inner:
        translate(draft, inner)
    return draft, loaded(draft, folder)


def loaded(draft: Draft, folder: Path) -> Config:
    (folder / "tiercel.toml").write_text(draft.toml("a test"))
    return Config.load(folder / "tiercel.toml", environ={})


def fate(draft: Draft, name: str) -> set[Fate]:
    return {note.fate for note in draft.notes if note.given.name == name}


def test_a_file_becomes_what_it_means(tmp_path: Path) -> None:
    draft, config = of_yaml(YAML, folder=tmp_path)
    assert config.ram.size_bytes == 60 * GIB, "LMCache's GB are GiB"
    disk, remote = config.tiers
    assert (str(disk.path), disk.size_bytes) == ("/var/cache/lmcache", 500 * GIB)
    assert remote.url == "valkey://kv@cache.example:6380?password_file=/etc/tiercel/valkey-password"
    assert (remote.read_workers, remote.write_workers) == (16, 16)
    assert fate(draft, "enable_blending") == {Fate.NOT_HERE}
    assert fate(draft, "enable_p2p") == {Fate.NEEDLESS}, "it was off"
    assert fate(draft, "chunck_size") == fate(draft, "extra_config.fancy") == {Fate.UNKNOWN}
    assert fate(draft, "remote_serde") == {Fate.DECIDE}
    text = draft.toml("a test")
    assert "hunter2" not in text
    assert "password" in text
    assert "GB are GiB" in text


def test_every_option_is_told_of(tmp_path: Path) -> None:
    draft, _ = of_yaml(YAML, folder=tmp_path)
    told = {note.given.name for note in draft.notes}
    names = {line.split(":")[0].strip() for line in YAML.splitlines() if ":" in line} - {"extra_config"}
    assert {name for name in names if name not in told and f"extra_config.{name}" not in told} == set()


def test_sizes_are_per_rank_there(tmp_path: Path) -> None:
    _, config = of_yaml(YAML, ranks=8, folder=tmp_path)
    assert config.ram.size_bytes == 480 * GIB
    assert config.tiers[0].size_bytes == 4000 * GIB
    _, config = of_yaml("local_cpu: true", ranks=2, folder=tmp_path)
    assert config.ram.size_bytes == 10 * GIB, "LMCache's default"


def test_a_variable_goes_before_the_file(tmp_path: Path) -> None:
    environ = {
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "7",
        "LMCACHE_TRACK_USAGE": "true",
        "LMCACHE_NOVEL": "1",
        "HOME": "/",
    }
    draft, config = of_yaml(YAML, folder=tmp_path, **environ)
    assert config.ram.size_bytes == 7 * GIB
    assert fate(draft, "max_local_cpu_size") == {Fate.NEEDLESS}
    assert fate(draft, "LMCACHE_TRACK_USAGE") == {Fate.NEEDLESS}
    assert fate(draft, "LMCACHE_NOVEL") == {Fate.UNKNOWN}
    assert fate(draft, "HOME") == set()


@pytest.mark.parametrize(
    ("url", "extra", "expected"),
    [
        ("redis://h:1", {}, "valkey://h:1"),
        ("rediss://u@h:1/3", {}, "valkeys://u@h:1/3"),
        ("unix:///run/valkey.sock", {}, "valkey:///run/valkey.sock"),
        ("redis-cluster://a:1,b:2", {}, "valkey://a:1"),
        ("valkey://h:1", {"tls_enable": True, "valkey_database": 2}, "valkeys://h:1/2"),
        ("valkey://h:1", {"valkey_enable_ttl": True, "valkey_ttl_sec": 3600}, "valkey://h:1?ttl=1h"),
        ("valkey://h:1", {"valkey_ttl_sec": 3600}, "valkey://h:1"),
        ("s3://kv.s3.eu-central-1.amazonaws.com", {}, "s3://kv?region=eu-central-1"),
        ("s3://kv.s3.amazonaws.com", {"s3_region": "us-east-1"}, "s3://kv?region=us-east-1"),
        ("s3://kv.minio:9000", {"disable_tls": True}, "s3://kv?endpoint=http://kv.minio:9000&virtual_host=yes"),
        ("azure://kv", {"azure_account_url": "https://acct.blob.core.windows.net"}, "az://kv?account=acct"),
        ("mooncakestore://m:50051/", {"protocol": "rdma", "device_name": "mlx5_0"},
         "mooncake://m:50051?protocol=rdma&devices=mlx5_0"),
        ("mooncakestore://m:50051/", {"global_segment_size": 1 << 30}, "mooncake://m:50051?segment=1073741824B"),
    ],
)  # fmt: skip
def test_remote_places(url: str, extra: dict[str, Any], expected: str, tmp_path: Path) -> None:
    draft, config = of_yaml(json.dumps({"remote_url": url, "extra_config": extra}), folder=tmp_path)
    (tier,) = config.tiers
    assert tier.url == expected
    read(tier.url)
    assert not [note for note in draft.notes if note.fate is Fate.UNKNOWN]


def read(url: str) -> None:
    """As the tier itself reads it."""
    parsed = TierUrl.parse(url)
    {"valkey": read_valkey, "valkeys": read_valkey, "mooncake": read_mooncake}.get(parsed.scheme, str)(parsed)
    if parsed.scheme in ("s3", "az"):
        place = pytest.importorskip("tiercel.tiers.objects_place")
        place.place_of(parsed)


@pytest.mark.parametrize("url", ["lm://h:1", "infinistore://h:1", "sagemaker-hyperpod://h:1", "new://h:1"])
def test_places_without_a_tier_are_named(url: str, tmp_path: Path) -> None:
    draft, config = of_yaml(f"remote_url: '{url}'", folder=tmp_path)
    assert config.tiers == ()
    assert fate(draft, "remote_url") == {Fate.NOT_HERE}


def test_plugins_are_places_too(tmp_path: Path) -> None:
    given = {
        "remote_storage_plugins": ["fs.a", "redis", "hf3fs"],
        "extra_config": {"remote_storage_plugin.fs.a.base_path": "/mnt/kv", "redis_url": "redis://h:1"},
    }
    draft, config = of_yaml(json.dumps(given), folder=tmp_path)
    assert str(config.tiers[0].path) == "/mnt/kv"
    assert config.tiers[1].url == "valkey://h:1"
    assert fate(draft, "remote_storage_plugins.hf3fs") == {Fate.NOT_HERE}
    assert any("--disk-size" in note.text for note in draft.notes)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "no LMCache configuration"),
        ("a: 1\na: 2", "stands there 2 times"),
        ("a: &x [1]\nb: *x", "alias"),
        ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("max_local_cpu_size: lots", "max_local_cpu_size: 'lots' is not accepted"),
        ("max_local_cpu_size: .inf", "is not accepted"),
        ("max_local_cpu_size: -1", "is not accepted"),
        ("remote_url: nowhere", "is not accepted"),
        ("remote_url: 'redis://h:port'", "is not accepted"),
        ("extra_config: 3", "extra_config: '3' is not accepted"),
        ("[" * 5000, "nested more than 32 deep"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    text: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "l.yaml").write_text(text)
    assert cli.run(["migrate", str(tmp_path / "l.yaml")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert word in err


# ---- vLLM


def test_vllms_size_is_gib(tmp_path: Path) -> None:
    draft, config = of_words("vllm", "serve", "m", "--kv-offloading-size", "20", "--port=1", folder=tmp_path)
    assert config.ram.size_bytes == 20 * GIB
    (command,) = draft.commands
    assert command.startswith("vllm serve m --port=1 --kv-transfer-config ")
    assert "TiercelConnector" in command


def test_secrets_of_a_command_line_stay_there(tmp_path: Path) -> None:
    words = [
        "vllm",
        "serve",
        "m",
        "--api-key",
        "hush",
        "--otlp-traces-endpoint=http://u:hush@h",
        "--api-key=hush",
    ]
    draft, _ = of_words(*words, "--max-num-batched-tokens", "8192", folder=tmp_path)
    (command,) = draft.commands
    assert "hush" not in command
    assert "--api-key '***' '--otlp-traces-endpoint=http://u:***@h' '--api-key=***'" in command
    assert "--max-num-batched-tokens 8192" in command
    of_words("vllm", "serve", "m", "--chat-template", "a\nb\0", folder=tmp_path)


def tiering(**extra: object) -> str:
    return json.dumps({
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 2**34, **extra},
    })  # fmt: skip


def test_secondary_tiers_are_tiers(tmp_path: Path) -> None:
    tiers = [
        {"type": "fs", "root_dir": "/mnt/kv", "n_read_threads": 32, "backpressure": {}},
        {"type": "obj", "prefix": "team/a", "io_threads": 8, "store_config": {
            "bucket": "kv", "endpoint_override": "minio:9000", "access_key": "AKIA", "secret_key": "hush"}},
        {"type": "p2p", "port": 1},
    ]  # fmt: skip
    draft, config = of_words("--kv-transfer-config", tiering(secondary_tiers=tiers), folder=tmp_path)
    assert config.ram.size_bytes == 16 * GIB
    disk, bucket = config.tiers
    assert (str(disk.path), disk.read_workers, disk.size_bytes) == ("/mnt/kv", 32, 100 * 10**9)
    assert bucket.url == "s3://kv/team/a?endpoint=http://minio:9000&concurrency=8"
    read(bucket.url)
    text = draft.toml("a test")
    assert "hush" not in text
    assert "AKIA" not in text
    assert "AWS_SECRET_ACCESS_KEY" in text
    assert Fate.NOT_HERE in {note.fate for note in draft.notes if "secondary_tiers.2" in note.given.name}


def test_dotted_flags_are_one_object(tmp_path: Path) -> None:
    words = [
        "--kv-transfer-config.kv_connector", "SimpleCPUOffloadConnector",
        "--kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use_per_rank=1073741824",
        "--tensor-parallel-size", "4",
    ]  # fmt: skip
    draft, config = of_words(*words, folder=tmp_path)
    assert config.ram.size_bytes == 4 * GIB
    assert draft.commands[0].startswith("vllm serve MODEL --tensor-parallel-size 4 --kv-transfer-config")


def test_lmcache_under_vllm(tmp_path: Path) -> None:
    transfer = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_connector_extra_config": {"lmcache.max_local_cpu_size": 3},
    }
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {
        "connectors": [transfer, {"kv_connector": "NixlConnector", "kv_role": "kv_both"}]}}  # fmt: skip
    for one in (transfer, multi):
        draft, config = of_words("--kv-transfer-config", json.dumps(one), folder=tmp_path)
        assert config.ram.size_bytes == 3 * GIB
    assert any(note.given.value == "NixlConnector" and note.fate is Fate.NOT_HERE for note in draft.notes)


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config", "{"],
        ["--kv-transfer-config", "[]"],
        ["--kv-offloading-size", "many"],
        ["--kv-transfer-config", tiering(secondary_tiers=3)],
        ["--kv-transfer-config", tiering(secondary_tiers=[{"type": "fs"}])],
        ["--tensor-parallel-size", "two"],
    ],
)
def test_flags_that_cannot_be_read_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["migrate", "--", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--foo"], ["vllm", "serve", "m"], ["lmcache"], ["lmcache", "server"]])
def test_a_command_line_without_offloading_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    assert cli.run(["migrate", "--", *words]) == 2
    assert "nothing to migrate" in capsys.readouterr().err


def test_of_two_sizes_one_is_for_its_owner_to_decide(tmp_path: Path) -> None:
    draft = Draft()
    translate_words(draft, ["--kv-offloading-size", "20"], "t.toml")
    translate(draft, [Given("max_local_cpu_size", 7, "file x")])
    assert loaded(draft, tmp_path).ram.size_bytes == 20 * GIB
    assert fate(draft, "max_local_cpu_size") == {Fate.DECIDE}


# ---- LMCache's server


def test_the_server_is_a_daemon(tmp_path: Path) -> None:
    words = [
        "lmcache", "server", "--l1-size-gb", "60", "--eviction-policy", "LRU", "--no-l1-use-lazy",
        "--coordinator-url", "http://c:1", "--frobnicate",
        "--l2-adapter",
        '{"type": "fs_native", "base_path": "/var/cache/l2", "num_workers": 4, "max_capacity_gb": 100}',
        "--l2-adapter", '{"type": "valkey", "startup_nodes": [{"host": "v", "port": 7}], "password": "hush"}',
        "--l2-adapter", '{"type": "s3", "s3_endpoint": "s3://kv.s3.amazonaws.com", "s3_region": "us-east-1"}',
        "--l2-adapter", '{"type": "aerospike"}',
    ]  # fmt: skip
    draft, config = of_words(*words, folder=tmp_path)
    assert config.ram.size_bytes == 60 * GIB
    disk, valkey, bucket = config.tiers
    assert (disk.size_bytes, disk.read_workers) == (100 * GIB, 4)
    assert valkey.url == "valkey://v:7?password_file=/etc/tiercel/valkey-password"
    assert bucket.url == "s3://kv?region=us-east-1"
    assert (
        fate(draft, "--coordinator-url") == fate(draft, "--l2-adapter.type") - {Fate.TAKEN} == {Fate.NOT_HERE}
    )
    assert fate(draft, "--frobnicate") == {Fate.UNKNOWN}
    assert draft.commands == ["tiercel daemon --config tiercel.toml"]
    assert "hush" not in draft.toml("a test")


# ---- the command


def test_the_command_writes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "l.yaml").write_text(YAML)
    out = tmp_path / "t.toml"
    assert cli.run(["migrate", str(tmp_path / "l.yaml"), "-o", str(out)]) == 0
    told = capsys.readouterr().out
    assert f"wrote {out}" in told
    assert "enable_blending" in told
    before = out.read_text()
    assert Config.load(out, environ={}).ram.size_bytes == 60 * GIB
    assert cli.run(["migrate", "-o", str(out), "--", "--kv-offloading-size", "1"]) == 2
    assert "exists" in capsys.readouterr().err
    assert out.read_text() == before
    assert cli.run(["migrate", "-o", str(out), "--force", "--", "--kv-offloading-size", "1"]) == 0
    assert f"replaced {out}" in capsys.readouterr().out


def test_lmcaches_own_variable_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    assert cli.run(["migrate"]) == 2
    assert "nothing to migrate" in capsys.readouterr().err
    (tmp_path / "l.yaml").write_text("max_local_cpu_size: 9")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "l.yaml"))
    monkeypatch.setenv("LMCACHE_LOCAL_DISK", "/x")
    assert cli.run(["migrate"]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text) == {"ram": {"size": "9GiB"}}
    assert "LMCACHE_LOCAL_DISK" in text


# ---- whatever is given

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**12), st.floats(), st.text(max_size=20),
    st.lists(st.text(max_size=5)),
    st.sampled_from(["/a", "/a/b", "~x", "redis://u:secretword@h:1", "s3://b.c", "fs://h:1/p,/q"]),
    st.sampled_from(["naive", "1", "é\x7f", "mooncakestore://m:1", "azure://c"]),
)  # fmt: skip
NAMES = st.sampled_from([*sorted(lmcache.EQUAL - {"extra_config"}), "enable_pd", "typo", "ec_local_disk"])
EXTRA = st.dictionaries(
    st.sampled_from(["valkey_password", "s3_region", "tls_enable", "protocol", "fancy", "request_timeout"]),
    VALUES,
)


@settings(max_examples=120, deadline=None)
@given(st.dictionaries(NAMES, VALUES), EXTRA, st.integers(1, 16))
def test_what_is_written_loads_or_is_refused(
    options: dict[str, Any], extra: dict[str, Any], ranks: int
) -> None:
    draft, refused = Draft(), ""
    found = [Given(name, value, "file x") for name, value in {**options, "extra_config": extra}.items()]
    try:
        translate(draft, found, ranks)
        text = draft.toml("a file")
    except TiercelError as error:
        refused = str(error)
    assert "\n" not in refused
    assert "secretword" not in refused
    if refused:
        return
    tomllib.loads(text)
    assert "secretword" not in text
    told = {note.given.name for note in draft.notes}
    assert {*options, *(f"extra_config.{name}" for name in extra)} <= told


KEYS = (
    "type root_dir store_config prefix io_threads base_path max_capacity_gb num_workers host port password "
    "key_prefix ttl_seconds startup_nodes s3_endpoint s3_region serde master_server_address fancy"
).split()
KINDS = st.sampled_from(["fs", "obj", "p2p", "fs_native", "valkey", "s3", "mooncake_store"])
PLACE = st.dictionaries(st.sampled_from(KEYS), VALUES).flatmap(
    lambda one: KINDS.map(lambda kind: {**one, "type": kind})
)


@settings(max_examples=120, deadline=None)
@given(st.lists(PLACE, max_size=10), st.booleans())
def test_so_do_command_lines(places: list[dict[str, Any]], server: bool) -> None:
    draft, refused = Draft(), ""
    words = ["--kv-transfer-config", tiering(secondary_tiers=places)]
    if server:
        words = ["lmcache", "server", *(word for one in places for word in ("--l2-adapter", json.dumps(one)))]
    try:
        translate_words(draft, words, "t.toml")
        tomllib.loads(draft.toml("a command line"))
    except TiercelError as error:
        refused = str(error)
    assert "\n" not in refused
    assert "what would be written" not in refused


# ---- the tables are those of the packages


def package(name: str) -> Path:
    folder = next(ROOT.glob(f".venv-lmcache/lib/python3*/site-packages/{name}"), None)
    if folder is None:
        pytest.skip("LMCache is not installed (make bench-vllm)")
    return folder


def literal_keys(file: Path, name: str) -> set[str]:
    for node in ast.parse(file.read_text()).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            value = node.value  # type: ignore[attr-defined]
            return {key.value for key in value.keys}
    raise AssertionError(name)


def test_the_table_is_lmcaches() -> None:
    file = package("lmcache") / "v1" / "config.py"
    defined = literal_keys(file, "_CONFIG_DEFINITIONS")
    assert len(defined) > 100
    assert lmcache.EQUAL | lmcache.WITHOUT.keys() == defined
    assert not lmcache.EQUAL & lmcache.WITHOUT.keys()
    old = literal_keys(file, "_CONFIG_ALIASES") | literal_keys(file, "_DEPRECATED_CONFIGS")
    assert lmcache.ALIASES.keys() == old - defined


def flags_in(*files: Path) -> Iterator[str]:
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                yield from (one.value for one in node.args if isinstance(one, ast.Constant))


def test_the_table_of_the_server_is_lmcaches() -> None:
    folder = package("lmcache") / "v1"
    defined = set(flags_in(
        folder / "distributed/config.py", folder / "multiprocess/config.py",
        folder / "mp_observability/config.py", folder / "distributed/l2_adapters/config.py",
    ))  # fmt: skip
    ours = lmcache_server.EQUAL | lmcache_server.WITHOUT.keys()
    assert len(defined) > 80
    assert {one for one in ours if not one.startswith("--no-")} == defined


def test_the_tables_of_vllm_are_vllms() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed (make setup VLLM=cpu)")
    folder = Path(spec.origin).parent
    fields = {
        node.target.id
        for one in ast.walk(ast.parse((folder / "config/kv_transfer.py").read_text()))
        if isinstance(one, ast.ClassDef) and one.name == "KVTransferConfig"
        for node in one.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert fields >= {"kv_connector", "kv_load_failure_policy"}
    # Of older releases there are more.
    assert fields - {"kv_connector", "kv_role", "kv_connector_extra_config"} <= vllm.TRANSFER.keys()
    text = "".join(
        file.read_text()
        for file in [*folder.glob("v1/kv_offload/**/*.py"), *folder.glob("distributed/kv_transfer/**/*.py")]
    )
    assert [name for name in vllm.EXTRA if f'"{name}"' not in text and f" {name}:" not in text] == []
