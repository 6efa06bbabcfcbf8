"""vLLM's own file tier and ours under one scheduler: what each does with a bad byte, a cap, other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.secondary.toy import ROW, Tiered, on_disk, socket_of
from tests.engines.vllm.toy import prompt
from tests.store.support import drop_ram, file_bytes


def fs(folder: Path, **options: Any) -> list[dict[str, Any]]:
    return [{"type": "fs", "root_dir": str(folder), "n_read_threads": 2, "n_write_threads": 2, **options}]


def flip(folder: Path, pattern: str) -> None:
    """One byte of a token in every file."""
    for path in folder.rglob(pattern):
        content = bytearray(path.read_bytes())
        content[-3000] ^= 0xFF
        path.write_bytes(content)


def test_a_flipped_byte_reaches_the_model_from_vllm_s_files_and_not_from_ours(tmp_path: Path) -> None:
    """D32."""
    theirs = Tiered(tmp_path, tiers=fs(tmp_path / "fs"))
    with theirs.start() as engine:
        engine.run("cold", prompt(161), 1)
        engine.lose_rows()
        assert engine.cached(engine.run("whole", prompt(161), 1)) == 160
    flip(tmp_path / "fs", "*.bin")
    with theirs.start() as engine, pytest.raises(AssertionError, match="flipped: wrong KV"):
        engine.run("flipped", prompt(161), 1)
    with on_disk(tmp_path / "ours") as (daemon, _):
        ours = Tiered(tmp_path, tier=socket_of(daemon))
        with ours.start() as engine:
            engine.run("cold", prompt(161), 1)
            assert daemon.inner.flush(10)
            drop_ram(daemon.inner)
            engine.lose_rows()
            assert engine.cached(engine.run("whole", prompt(161), 1)) == 160
        assert daemon.inner.flush(10)
        drop_ram(daemon.inner)
        flip(tmp_path / "ours", "*.kv")
        with ours.start() as engine:
            assert engine.cached(engine.run("flipped", prompt(161), 1)) == 0
            assert engine.count("loads_failed") == 1


def test_vllm_s_files_grow_and_ours_stay_within_their_cap(tmp_path: Path) -> None:
    """D30."""
    cap_bytes, prompts = 1 << 20, 5
    with Tiered(tmp_path, tiers=fs(tmp_path / "fs")).start() as engine:
        for number in range(prompts):
            engine.run(f"r{number}", prompt(1000, number), 1)
        engine.drain()
    stored = sum(path.stat().st_size for path in (tmp_path / "fs").rglob("*.bin"))
    assert stored == prompts * 62 * ROW > cap_bytes
    with on_disk(tmp_path / "ours", cap_bytes=cap_bytes) as (daemon, _):
        with Tiered(tmp_path, tier=socket_of(daemon)).start() as engine:
            for number in range(prompts):
                engine.run(f"r{number}", prompt(1000, number), 1)
        assert daemon.inner.flush(10)
        assert cap_bytes / 2 < file_bytes(tmp_path / "ours") <= cap_bytes


def test_a_model_whose_configuration_changed_gets_the_old_bytes_from_vllm_s_files_and_none_from_ours(
    tmp_path: Path,
) -> None:
    """D01, D06: the same folder, another rope: as with `--hf-overrides`, or other weights in one place."""
    with Tiered(tmp_path, tiers=fs(tmp_path / "fs")).start() as engine:
        engine.run("cold", prompt(161), 1)
    with (
        Tiered(tmp_path, tiers=fs(tmp_path / "fs"), seed=1).start() as engine,
        pytest.raises(AssertionError, match="other: wrong KV"),
    ):
        engine.run("other", prompt(161), 1)
    with on_disk(tmp_path / "ours") as (daemon, _):
        for seed, reused in ((0, 0), (1, 0), (0, 160), (1, 160)):
            with Tiered(tmp_path, tier=socket_of(daemon), seed=seed).start() as engine:
                assert engine.cached(engine.run("r", prompt(161), 1)) == reused


def test_after_vllm_s_reset_its_files_are_used_as_before_and_ours_are_not(tmp_path: Path) -> None:
    """D06: vLLM resets its connector when weights change in the running engine."""
    found = {}
    with on_disk(tmp_path / "ours") as (daemon, _):
        for kind, toy in (
            ("fs", Tiered(tmp_path, tiers=fs(tmp_path / "fs"))),
            ("ours", Tiered(tmp_path, tier=socket_of(daemon))),
        ):
            with toy.start() as engine:
                engine.run("old", prompt(161), 1)
                engine.drain()
                assert engine.scheduler.reset_prefix_cache(reset_connector=True)
                found[kind] = engine.cached(engine.run("new", prompt(161), 1))
    assert found == {"fs": 160, "ours": 0}
