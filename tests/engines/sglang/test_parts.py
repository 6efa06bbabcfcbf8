"""The parts of the SGLang backend that need no SGLang: options, places of pages, names, weights in turn."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiercel.engines import weights
from tiercel.engines.sglang import server
from tiercel.engines.sglang.naming import Rank, base_identity, identity_of, named
from tiercel.engines.sglang.pages import copy_in, copy_out, pages_of
from tiercel.engines.sglang.pools import Pool
from tiercel.engines.sglang.server import Server, this_server
from tiercel.engines.sglang.support import check_version, read
from tiercel.errors import ConfigError, EngineError, ModelError

RANK = Rank(0, 1, 0, 1, 0, 1, same_on_all=False)
SERVER = Server(("m", None), None, "auto", b"flags", "torch2+sglang0.5.1", "port 1")


@dataclass
class ToyPool:
    """A host pool as far as its pages go: per layer one run of keys and one of values."""

    tokens: int = 12
    page_size: int = 4
    layers: int = 3
    width: int = 8
    layout: str = "layer_first"
    dtype: torch.dtype = torch.bfloat16
    pages_buffer: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.tokens
        self.size_per_token = 2 * self.layers * self.width * self.dtype.itemsize
        self.pages_buffer = torch.zeros((2, self.layers, self.tokens, self.width), dtype=self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        row = self.width * self.dtype.itemsize
        starts = [
            self.pages_buffer[side, layer].data_ptr() + int(first) * row
            for first in indices[:: self.page_size]
            for layer in range(self.layers)
            for side in range(2)
        ]
        return starts, [row * self.page_size] * len(starts)


# Options and versions.


def test_what_is_not_sglangs_is_a_setting_of_ours(tmp_path: Path) -> None:
    extra = {
        "backend_name": "tiercel", "module_path": "tiercel.engines.sglang", "class_name": "TiercelHiCache",
        "interface_v1": 1, "ram.size": "64MiB", "tiers": [{"path": str(tmp_path), "size": "1GiB"}],
        "daemon": {"socket": "/run/s"}, "revision": "v3",
    }  # fmt: skip
    options = read(extra)
    assert options.config.ram.size_bytes == 64 << 20
    assert options.config.tiers[0].size_bytes == 1 << 30
    assert str(options.config.daemon.socket) == "/run/s"
    assert options.revision == "v3"


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"ram.sise": "4GiB"}, "did you mean 'ram.size'"),
        ({"ram.size": 4}, "has no unit"),
        ({"interfacev1": 1}, "interfacev1"),
        ({"revision": 3}, "revision is 3"),
    ],
)
def test_a_wrong_option_is_one_line(extra: dict[str, object], told: str) -> None:
    """D41."""
    with pytest.raises(ConfigError) as fault:
        read(extra)
    assert told in str(fault.value)
    assert str(fault.value).startswith("hicache-storage-backend-extra-config: ")
    assert "\n" not in str(fault.value)


def test_another_release_is_refused_in_one_sentence() -> None:
    """D35."""
    check_version("0.5.23.post1+cpu")
    for found in ("0.4.10", "0.5.22", "1.0.0", "unknown"):
        with pytest.raises(EngineError, match=rf"SGLang {found} is not supported; accepted are 0\.5"):
            check_version(found)


# Places.


def page_bytes(pool: ToyPool, page: int) -> bytes:
    first = page * pool.page_size
    flat = pool.pages_buffer[:, :, first : first + pool.page_size].flatten()
    return flat.view(torch.uint8).numpy().tobytes()


@given(
    layers=st.integers(1, 4),
    page_size=st.integers(1, 8),
    pages=st.integers(1, 5),
    part=st.integers(1, 200),
    data=st.data(),
)
def test_a_page_is_the_same_bytes_in_one_piece_or_in_parts(
    layers: int, page_size: int, pages: int, part: int, data: st.DataObject
) -> None:
    """What goes out in parts of any size comes in elsewhere, and nothing beside it is touched."""
    pool = ToyPool(pages * page_size, page_size, layers)
    bits = pool.pages_buffer.view(torch.int16)
    bits.copy_(torch.arange(bits.numel(), dtype=torch.int16).view(bits.shape))
    told = pages_of(pool, "toy")
    assert told is not None
    source, target = data.draw(st.integers(0, pages - 1)), data.draw(st.integers(0, pages - 1))
    before = [page_bytes(pool, page) for page in range(pages)]
    parts = [bytearray(b"x" * part) for _ in range(-(-told.nbytes // part))]
    for number, one in enumerate(parts):
        copy_out(told.runs(source * page_size) or [], number * part, memoryview(one))
    joined = b"".join(parts)
    assert joined[: told.nbytes] == before[source]
    assert joined[told.nbytes :].count(0) == len(joined) - told.nbytes
    for number, one in enumerate(parts):
        copy_in(memoryview(one), told.runs(target * page_size) or [], number * part)
    after = [page_bytes(pool, page) for page in range(pages)]
    assert after == [before[source] if page == target else before[page] for page in range(pages)]


def test_only_whole_pages_within_the_pool_have_a_place() -> None:
    pool = Pool(torch.bfloat16, pages_of(ToyPool(), "toy"), None)
    assert pool.places(["a", "b"], torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])) is not None
    for indices in (
        torch.tensor([4, 5, 6, 7]),
        torch.tensor([1, 2, 3, 4, 8, 9, 10, 11]),
        torch.tensor([4, 5, 6, 7, 12, 13, 14, 15]),
        torch.tensor([-4, -3, -2, -1, 0, 1, 2, 3]),
        None,
    ):
        assert pool.places(["a", "b"], indices) is None


class Irregular(ToyPool):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        starts, sizes = super().get_page_buffer_meta(indices)
        return [start ^ (16 if int(indices[0]) == 8 else 0) for start in starts], sizes


class Elsewhere(ToyPool):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        starts, sizes = super().get_page_buffer_meta(indices)
        return [start + (1 << 40) for start in starts], sizes


class Silent(ToyPool):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise ValueError(f"Unsupported layout: {self.layout}")


@pytest.mark.parametrize(
    ("pool", "told"),
    [(Irregular(), "irregular"), (Elsewhere(), "outside its own memory"), (Silent(), "page_first")],
)
def test_a_pool_of_another_make_is_refused(pool: ToyPool, told: str) -> None:
    """D11: nothing is guessed from shapes."""
    with pytest.raises(EngineError, match=told) as fault:
        pages_of(pool, "toy")
    assert "\n" not in str(fault.value)


# Names.


def scope_root(rank: Rank = RANK, server: Server = SERVER, pool: ToyPool | None = None, **base: Any) -> bytes:
    pool = pool or ToyPool()
    pages = pages_of(pool, "kv")
    assert pages is not None
    told = {"name": "org/model", "revision": "r", "device": "cpu", **base}
    identity = identity_of(
        base_identity(told["name"], told["revision"], rank, server, told["device"]), rank, pool, "kv", pages
    )
    return named(identity, pages.nbytes, 1 << 20).scope.root


def test_equal_engines_have_equal_names() -> None:
    assert scope_root() == scope_root()


@pytest.mark.parametrize(
    "other",
    [
        {"name": "org/other"},
        {"name": "o" * 5000},
        {"revision": "s"},
        {"device": "NVIDIA H200"},
        {"server": replace(SERVER, computes=b"others")},
        {"server": replace(SERVER, releases="torch2+sglang0.5.2")},
        {"rank": replace(RANK, tp_size=2)},
        {"rank": replace(RANK, tp_size=2, tp_rank=1)},
        {"rank": replace(RANK, pp_size=2)},
        {"rank": replace(RANK, cp_size=2)},
        {"pool": ToyPool(dtype=torch.float16)},
        {"pool": ToyPool(page_size=2)},
        {"pool": ToyPool(layout="page_first")},
        {"pool": ToyPool(layers=2)},
    ],
    ids=lambda other: ",".join(f"{name}" for name in other),
)
def test_what_differs_in_one_thing_never_meets(other: dict[str, Any]) -> None:
    """D01, D06, D11, D45 and their kind; each pair of variants differs too."""
    assert scope_root(**other) != scope_root()


def test_names_of_any_length_fit() -> None:
    """D51: they are hashed, and very long ones stay distinct."""
    roots = {scope_root(name="p" * 3000 + end) for end in "abc"}
    assert len(roots) == 3
    pages = pages_of(ToyPool(), "kv")
    assert pages is not None
    one = named(base_identity("m", "r", RANK, SERVER, "cpu"), pages.nbytes, 1 << 20)
    keys = ["k" * 100_000, "../../etc/passwd", "\udcff", "", "k#0", "ключ"]
    chain, start = one.chain((), keys)
    assert start == 0
    assert {len(key) for key in chain.keys} == {32}
    assert len(set(chain.keys)) == len(keys)


def test_a_page_larger_than_a_slot_has_a_name_for_each_part() -> None:
    identity = base_identity("m", "r", RANK, SERVER, "cpu")
    whole, halves = named(identity, 1000, 1000), named(identity, 1000, 600)
    assert (whole.parts, whole.part_bytes) == (1, 1000)
    assert (halves.parts, halves.part_bytes) == (2, 500)
    chain, start = halves.chain(["a"], ["b", "c"])
    assert (len(chain), start) == (6, 2)
    assert len(set(chain.keys)) == 6
    assert not set(chain.keys) & set(whole.chain((), ["a", "b", "c"])[0].keys)
    assert halves.chain(["a"] * 5000, ["b"])[1] == 4096 * 2, "of a long prefix only the end is told"


# The engine's own arguments.


def test_without_arguments_the_weights_must_be_named() -> None:
    server = this_server("0.5.1")
    assert server.weights("v1") == "named:v1"
    if server.model is None:
        with pytest.raises(EngineError, match="set 'revision'"):
            server.weights(None)
    with pytest.raises((EngineError, ModelError), match="not found"):
        replace(SERVER, model=("no/such-model", None)).weights(None)


def test_an_adapter_trained_further_in_place_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D05: SGLang's ids of adapters given at the start are made of their names and paths alone."""
    path = str(tmp_path)
    arguments: dict[str, Any] = {"enable_lora": True, "lora_paths": [SimpleNamespace(lora_path=path)]}
    monkeypatch.setattr(server, "_arguments", lambda: (tuple(arguments), arguments.get))

    def computes() -> bytes:
        return this_server("0.5.1").computes

    with pytest.raises(EngineError, match="cannot be read"):
        computes()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"before")
    before = computes()
    for unread in ([path], [f"a={path}"], [{"lora_name": "a", "lora_path": path}], {"a": path}):
        arguments["lora_paths"] = unread
        assert computes() == before, "control: unchanged, it is the same, however it is given"
    (tmp_path / "adapter_model.safetensors").write_bytes(b"behind")
    assert computes() != before
    arguments["enable_lora"] = None
    assert computes() != before
    arguments["lora_paths"] = [SimpleNamespace(lora_path="no/such-adapter")]
    with pytest.raises(EngineError, match="not found on this host"):
        computes()
    arguments["enable_lora"] = False
    none = computes()
    arguments["lora_paths"] = None
    assert computes() == none


def test_weights_are_read_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one engine start together: one reads, the others find what it has remembered."""
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"w" * 1000)
    read_files: list[Path] = []
    digest = weights._tree_digest

    def counted(path: Path, size_bytes: int) -> bytes:
        read_files.append(path)
        return digest(path, size_bytes)

    monkeypatch.setattr(weights, "_tree_digest", counted)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(weights.model_revision(str(tmp_path), None, "auto")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert sorted(path.name for path in read_files) == ["config.json", "model.safetensors"]
    assert weights.model_revision(str(tmp_path), None, "dummy") == "dummy"
