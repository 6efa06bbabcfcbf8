"""SGLang's HiCache backends side by side, on SGLang's own host pool: GB/s of pages kept and brought back.

python -m benchmarks.sglang [--page-tokens 64] [--pages 32] [--rounds 5] [--dir FOLDER] [--json FILE]

Arms, in turn in every round, each with new pages: SGLang's file backend (which reads from the page cache what
it has just written), Tiercel by tensors and by places from RAM, and Tiercel from disk (a daemon restarted
between keeping and reading; direct I/O).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from tests.engines.sglang.inside.boot import boot, installed

from benchmarks.timing import publish

if installed() is None:
    sys.exit("no SGLang beside this Python; make setup puts it there")
boot()

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402

from tiercel.engines.sglang import TiercelHiCache  # noqa: E402

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Bench:
    """The pool all arms share, and how many pages a batch has."""

    pool: Any
    pages: int

    def indices(self, first: int) -> torch.Tensor:
        """The host indices of a batch that begins at page `first`."""
        tokens = self.pool.page_size
        return torch.arange(first * tokens, (first + self.pages) * tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of one batch."""
        return int(self.pages * self.pool.page_size * self.pool.size_per_token)

    def by_places(self, backend: Any, keys: list[str]) -> tuple[float, float]:
        """GB/s of keeping the first pages and of reading them into the others."""
        kept = self._timed(lambda: all(backend.batch_set_v1(keys, self.indices(0))))
        read = self._timed(lambda: all(backend.batch_get_v1(keys, self.indices(self.pages))))
        return kept, read

    def by_tensors(self, backend: Any, keys: list[str]) -> tuple[float, float]:
        """The same as SGLang does it without places."""
        return self._timed(lambda: self._set(backend, keys)), self._timed(lambda: self._get(backend, keys))

    def _set(self, backend: Any, keys: list[str]) -> bool:
        tokens = self.pool.page_size
        pages = [self.pool.get_data_page(number * tokens) for number in range(self.pages)]
        return bool(backend.batch_set(keys, pages))

    def _get(self, backend: Any, keys: list[str]) -> bool:
        tokens = self.pool.page_size
        rooms = [self.pool.get_dummy_flat_data_page() for _ in keys]
        for number, page in enumerate(backend.batch_get(keys, rooms)):
            if page is None:
                return False
            self.pool.set_from_flat_data_page((self.pages + number) * tokens, page)
        return True

    def _timed(self, call: Any) -> float:
        started_s = time.perf_counter()
        done = call()
        taken_s = time.perf_counter() - started_s
        assert done, "a page was not there"
        return self.nbytes / taken_s / 1e9


@contextmanager
def daemon(path: Path, disk: Path | None) -> Iterator[None]:
    """`tiercel daemon` on `path`, until the end."""
    command = [sys.executable, "-m", "tiercel", "daemon", "--socket", str(path), "--set", "ram.size=2GiB"]
    if disk is not None:
        command += ["--set", f"tiers.0.path={disk}", "--set", "tiers.0.size=8GiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()
            process.wait(READY_S)


def backend(bench: Bench, path: Path) -> TiercelHiCache:
    """A backend on the daemon at `path`."""
    extra = {"daemon.socket": str(path), "revision": "bench", "interface_v1": 1}
    one = TiercelHiCache(config(extra))
    one.register_mem_pool_host(bench.pool)
    return one


def config(extra: dict[str, object]) -> Any:
    """What SGLang tells a storage backend, for one rank."""
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="bench", extra_config=extra,
    )  # fmt: skip


def keys_of(bench: Bench, *what: object) -> list[str]:
    """Names like SGLang's, new for every arm and round."""
    return [sha256(repr((what, number)).encode()).hexdigest() for number in range(bench.pages)]


def from_disk(bench: Bench, folder: Path, keys: list[str]) -> tuple[float, float]:
    """Keep pages until they are on disk, then read them with a new daemon."""
    path, disk = folder / "d.sock", folder / "kv"
    with daemon(path, disk):
        one = backend(bench, path)
        kept, _ = bench.by_places(one, keys)
        one.close()
    with daemon(path, disk):
        one = backend(bench, path)
        while one.batch_exists(keys) < len(keys):
            time.sleep(0.05)
        read = bench._timed(lambda: all(one.batch_get_v1(keys, bench.indices(bench.pages))))
        one.close()
    return kept, read


def measure(bench: Bench, folder: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Every arm in every round; the first is not counted."""
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / "sglang")
    figures: dict[str, list[tuple[float, float]]] = {}
    with daemon(folder / "s", None):
        ours, files = backend(bench, folder / "s"), HiCacheFile(config({}))
        for number in range(rounds + 1):
            arms = {
                "sglang file, tensors": lambda keys: bench.by_tensors(files, keys),
                "tiercel RAM, tensors": lambda keys: bench.by_tensors(ours, keys),
                "tiercel RAM, places": lambda keys: bench.by_places(ours, keys),
                "tiercel disk, places": lambda keys: from_disk(bench, folder, keys),
            }
            for name, arm in arms.items():
                seen = arm(keys_of(bench, name, number))
                if number:
                    figures.setdefault(name, []).append(seen)
        ours.close()
    return {
        name: {
            f"{what}_gb_s": {"median": statistics.median(one), "min": min(one), "max": max(one)}
            for what, one in zip(("keep", "read"), zip(*seen, strict=True), strict=True)
        }
        for name, seen in figures.items()
    }


def main() -> None:
    """Run and print."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    options.add_argument("--page-tokens", type=int, default=64)
    options.add_argument("--pages", type=int, default=32)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--dir", type=Path)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    tokens = given.page_tokens
    device = MHATokenToKVPool(
        size=tokens, page_size=tokens, dtype=torch.bfloat16, head_num=HEADS, head_dim=HEAD_DIM,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    pool = MHATokenToKVPoolHost(
        device._mha_buffer_info(), 1.0, 0, tokens, "page_first", pin_memory=False,
        device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS,
        host_token_capacity=2 * given.pages * tokens,
    )  # fmt: skip
    pool.kv_buffer.view(torch.int16).random_()
    bench = Bench(pool, given.pages)
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        figures = measure(bench, Path(folder), given.rounds)
    told = {"page_bytes": bench.nbytes // bench.pages, "batch_bytes": bench.nbytes, "arms": figures}
    publish(told, given.json)


if __name__ == "__main__":
    main()
