"""The backend through SGLang's own factory, on SGLang's own host pools, with real daemons behind it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.sglang.inside.support import MHA, MLA, Rig, hashes
from tests.service.running import Running
from tests.store.support import eventually

from tiercel.errors import ConfigError, DaemonError, EngineError, TiercelError


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Byte by byte: random bits may be no numbers."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


LAYOUTS = ["layer_first", "page_first", "page_first_direct"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Running(tmp_path_factory.mktemp("d") / "s", "ram.size=64MiB", "ram.slot=64KiB") as running:
        yield running


# The contract.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [MHA, MLA], ids=lambda kind: kind.__name__)
def test_pages_come_back_into_other_places(daemon: Running, kind: Any, layout: str) -> None:
    with Rig(daemon.path, kind, layout=layout) as rig:
        keys = hashes(4, layout)
        rig.fill()
        before = rig.content()
        assert rig.backend.batch_set_v1(keys, rig.indices(0, 1, 2, 3)) == [True] * 4
        rig.fill(0)
        assert rig.backend.batch_get_v1(keys, rig.indices(6, 2, 4, 5)) == [True] * 4
        after = rig.content()
        assert [after[at] for at in (6, 2, 4, 5)] == before[:4]
        assert all(not any(after[at]) for at in (0, 1, 3, 7)), "and nowhere else"


def test_a_prefix_ends_at_its_first_missing_page(daemon: Running) -> None:
    with Rig(daemon.path) as rig:
        keys = hashes(6, "prefix")
        rig.fill()
        assert rig.backend.batch_set_v1(keys[:3], rig.indices(0, 1, 2)) == [True] * 3
        assert rig.backend.batch_set_v1(keys[4:], rig.indices(4, 5)) == [True] * 2
        assert rig.backend.batch_exists(keys) == 3
        assert [rig.backend.exists(key) for key in keys] == [True, True, True, False, True, True]
        assert rig.backend.batch_exists([]) == 0
        got = rig.backend.batch_get_v1(keys, rig.indices(*range(6)))
        assert got == [True] * 3 + [False] * 3


def test_storing_again_is_told_as_stored(daemon: Running) -> None:
    with Rig(daemon.path) as rig:
        keys = hashes(4, "again")
        rig.fill()
        assert rig.backend.batch_set_v1(keys[:2], rig.indices(0, 1)) == [True] * 2
        stored = rig.stored()
        assert rig.backend.batch_set_v1(keys, rig.indices(0, 1, 2, 3)) == [True] * 4
        assert rig.backend.batch_set_v1(keys, rig.indices(0, 1, 2, 3)) == [True] * 4
        assert rig.stored() == stored + 2, "once"


def test_tensors_and_pool_pages_are_one_and_the_same(daemon: Running) -> None:
    """SGLang's older calls see what the newer ones store, and the other way round."""
    for layout in LAYOUTS:
        with Rig(daemon.path, layout=layout) as rig:
            backend, pool = rig.backend, rig.pool
            keys = hashes(3, "tensors" + layout)
            rig.fill()
            page = pool.get_data_page(0, flat=True).clone()
            other = pool.get_data_page(rig.page_size, flat=True).clone()
            assert backend.batch_set_v1(keys[:1], rig.indices(0)) == [True]
            assert same(backend.get(keys[0], pool.get_dummy_flat_data_page()), page)
            assert same(backend.get(keys[0]), page)
            assert backend.set(keys[1], other)
            assert backend.exists(keys[1])
            got = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
            assert same(got[1], other)
            assert got[2] is None
            assert backend.get(keys[2], pool.get_dummy_flat_data_page()) is None
            rig.fill(0)
            assert backend.batch_get_v1(keys[1:2], rig.indices(5)) == [True]
            assert same(pool.get_data_page(5 * rig.page_size, flat=True), other)


def test_what_cannot_be_is_false_and_never_an_exception(daemon: Running) -> None:
    with Rig(daemon.path) as rig:
        backend, keys = rig.backend, hashes(2, "odd")
        whole = rig.indices(0, 1)
        for indices in (None, whole[:-1], whole + 1, whole + 10_000, whole[: rig.page_size]):
            assert backend.batch_set_v1(keys, indices) == [False] * 2
            assert backend.batch_get_v1(keys, indices) == [False] * 2
        assert backend.batch_set_v1([], whole[:0]) == []
        assert backend.batch_get_v1([], whole[:0]) == []
        assert not backend.batch_set(keys, [torch.zeros(3), torch.zeros(3)])
        assert not backend.batch_set(keys, None)
        assert not backend.set(keys[0], None)
        assert backend.batch_get(keys, [torch.zeros(3), None]) == [None, None]
        assert backend.get(keys[0], 12345, 99) is None
        assert backend.batch_exists(keys) == 0, "and none of that was kept"
        assert backend.batch_set_v1(["k" * 100_000, "../../x"], whole) == [True] * 2
        assert backend.batch_exists(["k" * 100_000, "../../x"]) == 2


def test_the_pages_before_may_be_told(daemon: Running) -> None:
    with Rig(daemon.path) as rig:
        keys = hashes(8, "before")
        rig.fill()
        rest = rig.sglang.HiCacheStorageExtraInfo(prefix_keys=keys[:4])
        assert rig.backend.batch_set_v1(keys[:4], rig.indices(0, 1, 2, 3)) == [True] * 4
        assert rig.backend.batch_set_v1(keys[4:], rig.indices(4, 5, 6, 7), rest) == [True] * 4
        assert rig.backend.batch_exists(keys[4:], rest) == 4
        assert rig.backend.batch_exists(keys[4:]) == 4
        assert rig.backend.batch_get_v1(keys[4:], rig.indices(0, 1, 2, 3), rest) == [True] * 4
        assert rig.content()[:4] == rig.content()[4:8]


def test_a_page_larger_than_a_slot_is_kept_in_parts(tmp_path: Path) -> None:
    with (
        Running(tmp_path / "s", "ram.size=8MiB", "ram.slot=8KiB") as small,
        Rig(small.path, page_size=16) as rig,
    ):
        assert rig.page_bytes > 4096
        keys = hashes(3, "parts")
        rig.fill()
        before = rig.content()
        assert rig.backend.batch_set_v1(keys, rig.indices(0, 1, 2)) == [True] * 3
        assert rig.stored() > 3
        assert rig.backend.batch_exists([*keys, "none"]) == 3
        assert rig.backend.batch_get_v1(keys, rig.indices(3, 4, 5)) == [True] * 3
        assert rig.content()[3:6] == before[:3]


# Pools.


def test_a_hit_is_what_every_pool_can_restore(daemon: Running) -> None:
    """All pages of one kind, the last of another; a state exists only where a prompt once ended."""
    with Rig(daemon.path, mamba=True, draft=True) as rig:
        backend, sglang = rig.backend, rig.sglang
        keys = hashes(6, "pools")
        rig.fill()
        every = sglang.PoolTransfer(name=sglang.PoolName.DRAFT, hit_policy=sglang.PoolHitPolicy.ALL_PAGES)
        last = sglang.PoolTransfer(
            name=sglang.PoolName.MAMBA, keys=[keys[-1]], hit_policy=sglang.PoolHitPolicy.TRAILING_PAGES
        )
        assert backend.batch_set_v1(keys, rig.indices(*range(6))) == [True] * 6
        assert backend.batch_exists_v2(keys, []).kv_hit_pages == 6
        assert backend.batch_exists_v2(keys, [last]).kv_hit_pages == 0
        states = sglang.PoolTransfer(
            name=sglang.PoolName.MAMBA, keys=[keys[1], keys[3]], host_indices=torch.tensor([0, 2])
        )
        assert backend.batch_set_v2([states]) == {sglang.PoolName.MAMBA: [True, True]}
        found = backend.batch_exists_v2(keys, [last])
        assert (found.kv_hit_pages, found.extra_pool_hit_pages[sglang.PoolName.MAMBA]) == (4, 4)
        drafts = sglang.PoolTransfer(
            name=sglang.PoolName.DRAFT, keys=keys[:3], host_indices=rig.indices(0, 1, 2)
        )
        assert backend.batch_set_v2([drafts]) == {sglang.PoolName.DRAFT: [True] * 3}
        found = backend.batch_exists_v2(keys, [every, last])
        assert found.kv_hit_pages == 2, "three drafts, states after two and four: two"
        assert found.extra_pool_hit_pages[sglang.PoolName.DRAFT] == 3
        state = rig.mamba.get_data_page(0).clone()
        wanted = sglang.PoolTransfer(
            name=sglang.PoolName.MAMBA, keys=[keys[1]], host_indices=torch.tensor([3])
        )
        assert backend.batch_get_v2([wanted]) == {sglang.PoolName.MAMBA: [True]}
        assert same(rig.mamba.get_data_page(3), state)


def test_a_window_needs_all_of_its_pages(daemon: Running) -> None:
    with Rig(daemon.path, swa=True) as rig:
        backend, sglang = rig.backend, rig.sglang
        keys = hashes(6, "window")
        rig.fill()
        window = sglang.PoolTransfer(
            name=sglang.PoolName.SWA, keys=keys[-2:], hit_policy=sglang.PoolHitPolicy.TRAILING_PAGES
        )
        assert backend.batch_set_v1(keys, rig.indices(*range(6))) == [True] * 6
        for stored, hit in [((1, 2), 3), ((5,), 3), ((4,), 6)]:
            some = sglang.PoolTransfer(
                name=sglang.PoolName.SWA, keys=[keys[at] for at in stored], host_indices=rig.indices(*stored)
            )
            assert all(backend.batch_set_v2([some])[sglang.PoolName.SWA])
            assert backend.batch_exists_v2(keys, [window]).kv_hit_pages == hit


def test_an_unknown_pool_and_a_wrong_length_are_misses(daemon: Running) -> None:
    with Rig(daemon.path, mamba=True) as rig:
        sglang, keys = rig.sglang, hashes(2, "unknown")
        for name, indices in [(sglang.PoolName.SWA, rig.indices(0, 1)), (sglang.PoolName.MAMBA, None)]:
            some = sglang.PoolTransfer(name=name, keys=keys, host_indices=indices)
            assert rig.backend.batch_set_v2([some]) == {name: [False, False]}
            assert rig.backend.batch_get_v2([some]) == {name: [False, False]}
        empty = sglang.PoolTransfer(name=sglang.PoolName.MAMBA, keys=None)
        assert rig.backend.batch_get_v2([empty]) == {sglang.PoolName.MAMBA: []}


def test_pools_never_meet(daemon: Running) -> None:
    """A draft's page has the model's size and the same hash."""
    with Rig(daemon.path, draft=True) as rig:
        sglang, keys = rig.sglang, hashes(1, "meet")
        rig.fill()
        assert rig.backend.batch_set_v1(keys, rig.indices(0)) == [True]
        draft = sglang.PoolTransfer(name=sglang.PoolName.DRAFT, keys=keys, host_indices=rig.indices(1))
        assert rig.backend.batch_get_v2([draft]) == {sglang.PoolName.DRAFT: [False]}
        assert rig.backend.batch_exists_v2(keys, [draft]).kv_hit_pages == 0


# Who shares what.


@pytest.mark.parametrize(
    "other",
    [
        {"model": "org/other"}, {"revision": "2"}, {"tp_size": 2}, {"tp_size": 2, "tp_rank": 1},
        {"pp_size": 2}, {"dtype": torch.float16}, {"page_size": 8}, {"layout": "page_first"}, {"layers": 3},
    ],
    ids=str,
)  # fmt: skip
def test_another_engine_shares_only_what_is_the_same(daemon: Running, other: dict[str, Any]) -> None:
    """D01, D06, D45: what differs is a miss; the same engine again hits."""
    keys = hashes(2, f"share {other}")
    with Rig(daemon.path) as first:
        first.fill()
        assert first.backend.batch_set_v1(keys, first.indices(0, 1)) == [True] * 2
        content = first.content()
    with Rig(daemon.path, **other) as second:
        assert second.backend.batch_exists(keys) == 0
        assert second.backend.batch_get_v1(keys, second.indices(0, 1)) == [False] * 2
    with Rig(daemon.path) as third:
        assert third.backend.batch_exists(keys) == 2
        assert third.backend.batch_get_v1(keys, third.indices(4, 5)) == [True] * 2
        assert third.content()[4:6] == content[:2]


def test_ranks_have_parts_of_their_own_and_share_what_is_replicated(daemon: Running) -> None:
    keys = hashes(2, "ranks")
    with Rig(daemon.path, tp_size=2) as zero, Rig(daemon.path, tp_size=2, tp_rank=1) as one:
        zero.fill(1)
        one.fill(2)
        assert zero.backend.batch_set_v1(keys, zero.indices(0, 1)) == [True] * 2
        assert one.backend.batch_exists(keys) == 0, "another rank's heads"
        assert one.backend.batch_set_v1(keys, one.indices(0, 1)) == [True] * 2
        for rig in (zero, one):
            own = rig.content()
            rig.fill(0)
            assert rig.backend.batch_get_v1(keys, rig.indices(0, 1)) == [True] * 2
            assert rig.content()[:2] == own[:2]
    with (
        Rig(daemon.path, MLA, tp_size=2, mamba=True) as zero,
        Rig(daemon.path, MLA, tp_size=2, tp_rank=1, mamba=True) as one,
    ):
        zero.fill()
        assert zero.backend.batch_set_v1(keys, zero.indices(0, 1)) == [True] * 2
        assert one.backend.batch_get_v1(keys, one.indices(0, 1)) == [True] * 2, "the same on all ranks"
        assert one.content()[:2] == zero.content()[:2]
        state = zero.sglang.PoolTransfer(
            name=zero.sglang.PoolName.MAMBA, keys=keys[:1], host_indices=torch.tensor([0])
        )
        assert zero.backend.batch_set_v2([state]) == {zero.sglang.PoolName.MAMBA: [True]}
        assert one.backend.batch_get_v2([state]) == {one.sglang.PoolName.MAMBA: [False]}, "not the same"


# Steering and figures.


def test_cleared_is_cleared(daemon: Running) -> None:
    keys = hashes(2, "clear")
    with Rig(daemon.path) as rig, Rig(daemon.path, model="org/other") as other:
        for one in (rig, other):
            assert one.backend.batch_set_v1(keys, one.indices(0, 1)) == [True] * 2
        rig.backend.clear()
        assert rig.backend.batch_exists(keys) == 0
        assert other.backend.batch_exists(keys) == 2, "another model's pages stay"
        assert rig.backend.batch_set_v1(keys, rig.indices(0, 1)) == [True] * 2
        assert rig.backend.batch_exists(keys) == 2


def test_figures_are_those_sglang_asks_for(daemon: Running) -> None:
    keys = hashes(3, "figures")
    with Rig(daemon.path, metrics=True) as rig:
        rig.backend.batch_set_v1(keys, rig.indices(0, 1, 2))
        rig.backend.batch_get_v1(keys, rig.indices(0, 1, 2))
        rig.backend.batch_get_v1(["none"], rig.indices(0))
        seen = rig.backend.get_stats()
        assert (seen.backup_pgs, seen.prefetch_pgs) == ([3], [3])
        assert min(*seen.backup_bandwidth, *seen.prefetch_bandwidth) > 0
        assert rig.backend.get_stats().prefetch_pgs == []
    with Rig(daemon.path) as rig:
        rig.backend.batch_get_v1(keys, rig.indices(0, 1, 2))
        assert rig.backend.get_stats() is None


def test_prefetch_and_backup_threads_at_once(daemon: Running) -> None:
    """SGLang calls from two threads and more; every page read is one that was written, whole."""
    with Rig(daemon.path) as rig:
        faults: list[str] = []
        done = [hashes(2, f"threads{number}") for number in range(40)]
        rig.fill()
        source = rig.content()

        def backup(first: int) -> None:
            for number in range(first, len(done), 2):
                if rig.backend.batch_set_v1(done[number], rig.indices(0, 1)) != [True] * 2:
                    faults.append(f"set {number}")

        def prefetch(pages: tuple[int, int]) -> None:
            for number, keys in enumerate(done):
                if not eventually(lambda keys=keys: rig.backend.batch_exists(keys) == 2, 20):
                    faults.append(f"exists {number}")
                elif rig.backend.batch_get_v1(keys, rig.indices(*pages)) != [True] * 2:
                    faults.append(f"get {number}")

        threads = [threading.Thread(target=backup, args=(first,)) for first in range(2)]
        threads += [threading.Thread(target=prefetch, args=(pages,)) for pages in ((4, 5), (6, 7))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert faults == []
        assert not any(thread.is_alive() for thread in threads)
        assert [rig.content()[at] for at in (4, 5, 6, 7)] == [source[0], source[1]] * 2


# Starting.


def test_a_private_daemon_is_shared_by_the_ranks_and_outlives_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    keys = hashes(2, "private")
    extra = {"ram.size": "16MiB"}
    with (
        Rig(None, MLA, tp_size=2, extra=extra) as zero,
        Rig(None, MLA, tp_size=2, tp_rank=1, extra=extra) as one,
    ):
        zero.fill()
        assert zero.backend.batch_set_v1(keys, zero.indices(0, 1)) == [True] * 2
        assert one.backend.batch_get_v1(keys, one.indices(2, 3)) == [True] * 2
        assert one.content()[2:4] == zero.content()[:2]
        assert len(list((tmp_path / "tiercel").glob("*.sock"))) == 1


@pytest.mark.parametrize(
    ("extra", "kind", "told"),
    [
        ({"ram.sise": "1GiB"}, ConfigError, "did you mean 'ram.size'"),
        ({"daemon.socket": "/nonexistent/s"}, DaemonError, "/nonexistent/s"),
        ({"revision": None}, EngineError, "set 'revision'"),
        ({"ram.size": "900TiB"}, DaemonError, "does not fit"),
    ],
)
def test_a_mistake_is_told_at_the_start_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    kind: type[TiercelError],
    told: str,
) -> None:
    """D26, D28, D41."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(kind, match=told) as fault:
        Rig(None, extra=extra)
    assert "\n" not in str(fault.value)


def test_another_release_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """D35."""
    monkeypatch.setattr("sglang.__version__", "0.6.0")
    with pytest.raises(EngineError, match=r"SGLang 0\.6\.0 is not supported"):
        Rig(None)
