"""The parts that need no engine: names, jobs, layouts, options, refusals, figures."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.vllm.toy import Toy, toy_cache, toy_config, toy_store, toy_views
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from tiercel.blocks import Identity, Scope
from tiercel.engines.vllm import TiercelConnector
from tiercel.engines.vllm.adapters import Adapters
from tiercel.engines.vllm.jobs import NOBODY, Done, Owner, Shard, writable_from
from tiercel.engines.vllm.layout import register
from tiercel.engines.vllm.mover import CpuMover, address_of, mover_for
from tiercel.engines.vllm.naming import Names, identity_of, units_per_block
from tiercel.engines.vllm.opening import open_scheduler
from tiercel.engines.vllm.options import read_options
from tiercel.engines.vllm.scales import scales_digest
from tiercel.engines.vllm.stats import COUNTERS, Tally, TiercelStats
from tiercel.engines.vllm.support import check_cache, check_engine, check_version
from tiercel.engines.weights import adapter_digest
from tiercel.errors import ConfigError, DaemonError, EngineError, ModelError

IDENTITY = Identity("m", "1", "bf16", b"g", "vllm-1", 16)
SHARD = Shard(0, 1, True, b"layout", 4096, "cpu+backend")
SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 4, "dtype": torch.float32}


def hashes(count: int, seed: int = 0) -> bytes:
    return b"".join(bytes([seed, number]) * 16 for number in range(count))


# Names.


def test_keys_follow_from_the_engine_s_hash_and_the_scope_alone() -> None:
    names = Names(IDENTITY)
    long = names.chain("r", hashes(5), NOBODY)
    assert names.chain("r", hashes(8), NOBODY).keys[:5] == long.keys
    assert names.chain("r", hashes(3), NOBODY).keys == long.keys[:3]
    assert Names(IDENTITY).chain("other", hashes(5), NOBODY).keys == long.keys
    assert names.chain("r", hashes(5, seed=1), NOBODY).keys != long.keys
    assert all(key.startswith(names.scope(NOBODY).tag) for key in long.keys)


def test_no_two_scopes_share_a_key() -> None:
    changes = [
        {"model": "n"}, {"revision": "2"}, {"kv_dtype": "fp8"}, {"geometry": b"h"}, {"layout": "vllm-2"},
        {"block_tokens": 32}, {"shard": 0, "shards": 2}, {"shard": 1, "shards": 2}, {"scales": b"s"},
    ]  # fmt: skip
    owners = [NOBODY, Owner(b"a"), Owner(b"b"), Owner(None, "t"), Owner(b"a", "t"), Owner(None, "x" * 5000)]
    scopes = [Names(IDENTITY).scope(owner) for owner in owners]
    scopes += [Scope(dataclasses.replace(IDENTITY, **change)) for change in changes]
    keys = [scope.rechain([b"h" * 32]).keys[0] for scope in scopes]
    assert len(set(keys)) == len(keys)
    # Nor does a key made from tokens equal one made from a hash of the same bytes.
    assert Scope(IDENTITY).chain(list(range(16))).keys[0] not in keys


def test_only_the_scopes_used_last_are_remembered_and_no_salt_is_shown() -> None:
    names = Names(IDENTITY)
    for number in range(1500):
        names.chain("r", hashes(1), Owner(None, f"secret-{number}"))
    assert len(names.scopes()) == 1024
    assert names.scope(Owner(None, "secret-0")).root == Scope(IDENTITY, salt="secret-0").root
    assert "secret" not in repr(Owner(None, "secret-1"))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 1)), max_size=30))
def test_remembered_keys_are_those_made_anew(asked: list[tuple[str, int, int]]) -> None:
    names = Names(IDENTITY)
    for request, count, seed in asked:
        made = names.chain(request, hashes(count, seed), NOBODY)
        assert made.keys == Names(IDENTITY).chain("x", hashes(count, seed), NOBODY).keys


def test_identity_tells_configurations_apart(tmp_path: Path) -> None:
    shard = Shard(0, 1, True, b"layout", 4096, "cpu+backend")

    def identity(seed: int = 0, of: Shard = shard, **changes: Any) -> Identity:
        config = toy_config(Toy(tmp_path, None, seed=seed))
        for path, value in changes.items():
            section, _, name = path.partition("__")
            setattr(getattr(config, section), name, value)
        return identity_of(config, {of.number: of}, 16)

    base = identity()
    assert identity() == base
    others = [
        identity(seed=1),  # another rope base
        identity(model_config__dtype=torch.float16),
        identity(model_config__quantization="fp8"),
        identity(model_config__enforce_eager=not toy_config(Toy(tmp_path, None)).model_config.enforce_eager),
        identity(cache_config__cache_dtype="fp8"),
        identity(parallel_config__tensor_parallel_size=2),
        identity(of=dataclasses.replace(shard, layout=b"other")),
        identity(of=dataclasses.replace(shard, computed="cuda+backend")),
        identity(of=dataclasses.replace(shard, scales=b"s")),
        identity(of=Shard(1, 2, True, b"layout", 4096, "cpu+backend")),
    ]
    roots = [Scope(one).root for one in (base, *others)]
    assert len(set(roots)) == len(roots)


def test_the_weights_are_part_of_the_identity(tmp_path: Path) -> None:
    config = toy_config(Toy(tmp_path, None))
    config.load_config.load_format = "auto"
    shard = Shard(0, 1, True, b"layout", 4096, "cpu")
    with pytest.raises(ModelError, match="holds no weights"):
        identity_of(config, {0: shard}, 16)
    weights = tmp_path / "toy-model" / "model.safetensors"
    weights.write_bytes(b"one")
    first = identity_of(config, {0: shard}, 16)
    weights.write_bytes(b"two")
    assert identity_of(config, {0: shard}, 16).revision != first.revision
    # What any of the shards registered counts, not only the first one's layout.
    others = [dataclasses.replace(shard, number=1, shards=2, layout=one) for one in (b"a", b"b")]
    found = [identity_of(config, {0: shard, 1: one}, 16).geometry for one in others]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("unit", "slot", "units"),
    [
        (1 << 20, None, 1),
        (3 << 20, None, 1),
        ((1 << 20) - 1, None, 2),
        (4096, None, 256),
        (4096, 8192, 2),
        (4096, 100, 1),
    ],
)
def test_blocks_have_a_mebibyte_where_a_slot_holds_it(unit: int, slot: int | None, units: int) -> None:
    assert units_per_block(unit, slot) == units


def test_adapters_are_told_apart_by_content_and_name(tmp_path: Path) -> None:
    def digest(**files: bytes) -> bytes | None:
        folder = tmp_path / str(next(count))
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return adapter_digest(folder)

    count = itertools.count()
    assert digest(a=b"1", b=b"2") == digest(a=b"1", b=b"2")
    found = [
        digest(a=b"1", b=b"2"),
        digest(a=b"2", b=b"1"),
        digest(a=b"12"),
        digest(ab=b"12"),
        digest(a=b"1"),
    ]
    assert len(set(found)) == len(found)
    assert digest() is None
    assert Adapters().digest(1, str(tmp_path / "missing")) is None


def test_an_adapter_whose_files_change_under_its_number_is_no_longer_known(tmp_path: Path) -> None:
    """vLLM may have the old weights or, if it made room for others meanwhile, the new ones."""
    folder, known = tmp_path / "adapter", Adapters()
    folder.mkdir()
    (folder / "weights").write_bytes(b"1")
    first = known.digest(1, str(folder))
    assert first is not None
    assert known.digest(1, str(folder)) == first
    (folder / "weights").write_bytes(b"22")
    assert known.digest(1, str(folder)) is None
    (folder / "weights").write_bytes(b"1")
    assert known.digest(1, str(folder)) is None
    assert known.digest(2, str(folder)) == first, "as loaded under another number"
    (folder / "weights").unlink()
    folder.rmdir()
    assert known.digest(2, str(folder)) == first, "what is gone cannot be loaded in its place"


# Jobs.


@given(st.data())
def test_blocks_are_whole_from_where_no_group_has_a_gap(data: st.DataObject) -> None:
    per_block = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    blocks = data.draw(st.integers(1, 6))
    tables = []
    for count in per_block:
        gone = data.draw(st.integers(0, blocks * count))
        tables.append(tuple([0] * gone + list(range(1, blocks * count - gone + 1))))
    whole = [
        all(
            0 not in table[at * count : (at + 1) * count]
            for table, count in zip(tables, per_block, strict=True)
        )
        for at in range(blocks)
    ]
    first = writable_from(tables, per_block, blocks)
    assert whole == [at >= first for at in range(blocks)]


def test_reports_of_workers_add_up() -> None:
    done = Done({1: 1, 2: 1}, {"a"}).merged(Done({2: 1, 3: 1}, {"b"}))
    assert done == Done({1: 1, 2: 2, 3: 1}, {"a", "b"})


# Layouts.


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("skip", [0, 16])
def test_every_byte_of_a_block_comes_back(tmp_path: Path, layout: str, skip: int) -> None:
    """D11: fill with a pattern, save, scrub, load elsewhere: each (layer, block, head, token) byte-equal."""
    toy = Toy(tmp_path, None, layout=layout, layers=3, blocks=7)
    cache = toy_cache(toy)
    views = toy_views(toy, cache)
    registered = register(cache, views)
    total = sum(view.numel() for view in views.values())
    pattern = torch.arange(total, dtype=torch.float32)
    for at, view in enumerate(views.values()):
        view.copy_(pattern[at * view.numel() : (at + 1) * view.numel()].view(view.shape))
    payload = memoryview(bytearray(registered.unit_bytes(32)))
    before = {name: view[[4, 2]].clone() for name, view in views.items()}
    CpuMover().save(None, [(payload, registered.copies([[4, 2]], 0, 32))])
    for view in views.values():
        view.zero_()
    CpuMover().load(None, [(payload, registered.copies([[1, 5][skip // 16 :]], skip, 32))])
    for name, view in views.items():
        first = skip // 16
        assert torch.equal(view[[1, 5][first:]], before[name][first:])
        untouched = [block for block in range(7) if block not in [1, 5][first:]]
        assert not view[untouched].any()


def test_layers_packed_together_are_one_copy(tmp_path: Path) -> None:
    packed = Toy(tmp_path, None, layout="BLHNC", layers=3)
    spread = Toy(tmp_path, None, layout="LBHNC", layers=3)
    counts = [
        len(register(toy_cache(toy), toy_views(toy, toy_cache(toy))).copies([[1]], 0, 16).sizes)
        for toy in (packed, spread)
    ]
    assert counts == [1, 3]


def test_kernel_blocks_smaller_than_vllm_s_are_one_block(tmp_path: Path) -> None:
    toy = Toy(tmp_path, None, layers=1, blocks=5)
    cache = toy_cache(toy)
    (view,) = toy_views(toy, cache).values()
    split = view.permute(0, 2, 1, 3).contiguous().view(20, 4, 2, 8).permute(0, 2, 1, 3)
    layout = register(cache, {"group0.layer0": split})
    assert layout.unit_bytes(16) == 16 * 2 * 8 * 4
    assert layout.digest != register(cache, {"group0.layer0": view}).digest


def refused(tensor: Any) -> str:
    cache = KVCacheConfig(5, [], [KVCacheGroupSpec(["layer"], FullAttentionSpec(**SHAPE))])
    with pytest.raises(EngineError) as fault:
        register(cache, {"layer": tensor})
    return str(fault.value)


def test_layouts_that_are_not_understood_are_refused() -> None:
    whole = torch.zeros(5, 2, 16, 8)
    assert "not one tensor" in refused([whole])
    assert "rows for 5 blocks" in refused(torch.zeros(6, 2, 16, 8))
    assert "bytes per block where vLLM plans" in refused(torch.zeros(5, 2, 16, 4))
    assert "bytes per block where vLLM plans" in refused(torch.zeros(5, 2, 16, 9))
    assert "overlaps itself" in refused(whole[:, :1].expand(5, 2, 16, 8))
    assert "beyond its memory" not in refused(torch.zeros(5, 2, 17, 8))
    with pytest.raises(EngineError, match="accepted are cpu and cuda"):
        mover_for(torch.device("meta"))


def test_an_address_is_where_the_bytes_are() -> None:
    data = bytearray(b"abcdef")
    view = memoryview(data)
    assert address_of(view[2:]) == address_of(view) + 2
    assert address_of(view.toreadonly()) == address_of(view)


# Scales.


def test_scales_outside_the_cache_are_part_of_the_identity(tmp_path: Path) -> None:
    """D43: other scales, other blocks; scales per token outside the cache are refused."""

    def digest(dtype: str, scale: float, **layer: Any) -> bytes | None:
        toy = Toy(tmp_path, None)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=dtype),
            compilation_config=SimpleNamespace(
                static_forward_context={
                    f"group0.layer{number}": SimpleNamespace(
                        _k_scale=torch.tensor(scale), _v_scale=torch.tensor([1.0, 2.0]), **layer
                    )
                    for number in range(2)
                }
            ),
        )
        return scales_digest(config, toy_cache(toy))  # type: ignore[arg-type]

    assert digest("auto", 1.0) is None
    assert digest("fp8_e4m3", 1.0) == digest("fp8_e4m3", 1.0)
    assert digest("fp8_e4m3", 1.0) != digest("fp8_e4m3", 0.5)
    cache = torch.zeros(4, 16)
    assert digest("fp8", 1.0, kv_cache=cache, k_scale_cache=cache[:, :2]) is not None
    with pytest.raises(EngineError, match="keeps k_scale_cache outside its KV cache"):
        digest("fp8", 1.0, kv_cache=cache, k_scale_cache=torch.zeros(4, 2))


# Options and refusals.


def test_options_are_the_settings_there_are(tmp_path: Path) -> None:
    file = tmp_path / "tiercel.toml"
    file.write_text('[ram]\nsize = "1GiB"\n[store]\nload_deadline = "3s"\n')
    options = read_options({"config": str(file), "ram.size": "4GiB", "daemon": {"socket": "/run/x.sock"}})
    assert (options.ram.size_bytes, options.store.load_deadline_s) == (4 << 30, 3.0)
    assert str(options.daemon.socket) == "/run/x.sock"
    tiers = read_options({"tiers": [{"path": str(tmp_path), "size": "1GiB"}]}).tiers
    assert tiers == read_options({"tiers.0.path": str(tmp_path), "tiers.0.size": "1GiB"}).tiers


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"ram.sise": "4GiB"}, "did you mean 'ram.size'"),
        ({"ram": {"size": 4}}, "has no unit"),
        ({"config": 3}, "is not a path"),
        ({"rams": {"size": "4GiB"}}, "unknown setting"),
    ],
)
def test_a_wrong_option_is_one_line(extra: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as fault:
        read_options(extra)
    assert told in str(fault.value)
    assert str(fault.value).startswith("kv_connector_extra_config: ")
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+cpu"])
def test_a_known_version_is_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "1.0", "dev"])
def test_any_other_version_is_one_line(version: str) -> None:
    """D35."""
    with pytest.raises(EngineError, match=rf"vLLM {version} is not supported; accepted are 0\.32"):
        check_version(version)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("cache_config", "prefix_caching_hash_algo", "xxhash"),
        ("cache_config", "calculate_kv_scales", True),
        ("kv_transfer_config", "kv_role", "kv_producer"),
    ],
)
def test_flags_that_cannot_be_honoured_are_one_line(
    tmp_path: Path, section: str, name: str, value: Any
) -> None:
    config = toy_config(Toy(tmp_path, None))
    check_engine(config)
    object.__setattr__(getattr(config, section), name, value)
    with pytest.raises(EngineError) as fault:
        check_engine(config)
    assert name in str(fault.value)
    assert "\n" not in str(fault.value)


def cache_of(*specs: Any, **group: Any) -> KVCacheConfig:
    return KVCacheConfig(5, [], [KVCacheGroupSpec(["layer"], spec, **group) for spec in specs])


def test_kinds_of_cache_that_cannot_be_restored_are_refused() -> None:
    """D42."""
    full, window = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=32)
    mamba = MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))
    check_cache(cache_of(full, window))
    for cache, told in (
        (cache_of(full, mamba), "group 1 is a MambaSpec"),
        (cache_of(full, host_resident=True), "host memory"),
        (cache_of(full, enable_kv_transfer=False), "host memory"),
        (cache_of(dataclasses.replace(full, tokens_per_state=4)), "4 tokens per state"),
        (cache_of(), "no KV cache"),
    ):
        with pytest.raises(EngineError, match=told):
            check_cache(cache)


def test_a_daemon_with_smaller_slots_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"the daemon's slots hold 4\.0 KiB.*set ram.slot"):
        Toy(tmp_path, toy_store(payload=4096), layers=8).start()


def test_the_policy_that_fails_requests_is_replaced(tmp_path: Path) -> None:
    with Toy(tmp_path, toy_store()).start() as engine:
        assert engine.scheduler.recompute_kv_load_failures


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_what_cannot_work_is_told_at_the_start_by_every_process(
    tmp_path: Path, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy(tmp_path, None)
    TiercelConnector(toy_config(toy), role, toy_cache(toy))
    toy.extra = {"ram.sise": "4GiB"}
    with pytest.raises(ConfigError, match=r"did you mean 'ram\.size'"):
        TiercelConnector(toy_config(toy), role, toy_cache(toy))
    toy.extra = {}
    mamba = MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))
    with pytest.raises(EngineError, match="MambaSpec"):
        TiercelConnector(toy_config(toy), role, cache_of(mamba))
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    with pytest.raises(EngineError, match=r"vLLM 0\.99\.0 is not supported"):
        TiercelConnector(toy_config(toy), role, toy_cache(toy))


def test_no_daemon_where_one_is_named_is_told_at_the_start(tmp_path: Path) -> None:
    toy = Toy(tmp_path, None)
    options = read_options({"daemon.socket": str(tmp_path / "missing.sock")})
    with pytest.raises(DaemonError, match=r"missing\.sock"):
        open_scheduler(toy_config(toy), toy_cache(toy), [SHARD], options, "x", Tally())


# Media.


def test_media_are_part_of_a_block_s_name() -> None:
    """D03: keys differ from the first block that touches another picture, and are shared before it."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    init_none_hash(sha256)

    def keys(*pictures: tuple[str, int]) -> tuple[bytes, ...]:
        features = [
            MultiModalFeatureSpec(None, "image", picture, PlaceholderRange(offset=first, length=10))
            for picture, first in pictures
        ]
        request = Request(
            "r", [7] * 96, SamplingParams(max_tokens=1), None, mm_features=features,
            block_hasher=get_request_block_hasher(16, sha256),
        )  # fmt: skip
        return Names(IDENTITY).chain("r", b"".join(request.block_hashes), NOBODY).keys

    one, other = keys(("cat", 35)), keys(("dog", 35))
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])
    # A second picture later leaves the prefix through the first as it was.
    assert keys(("cat", 35), ("dog", 70))[:4] == one[:4]


# Figures.


def test_figures_are_clamped_and_never_raise() -> None:
    """D39: a counter can only go up, whatever it is told."""
    tally = Tally()
    tally.add("hit_tokens", -5)
    tally.add("hit_tokens", 30)
    tally.add("looked_up_tokens", 60)
    tally.called(0.002)
    stats = tally.take()
    assert stats is not None
    assert tally.take() is None
    both = stats.aggregate(TiercelStats(data={"hit_tokens": -3, "loads": float("nan"), "else": "x"}))
    shown = both.reduce()
    assert shown["hit_rate"] == 0.5
    assert shown["scheduler_calls_slow"] == 1
    assert not both.is_empty()
    assert set(shown) - {"hit_rate"} <= set(COUNTERS)
