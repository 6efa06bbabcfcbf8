"""The cache servers beside the engines: LMCache's and ours, each with and without a file tier."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.vllm.driver import Child, drop_page_cache, free_ports

TIERCEL = Path(sys.executable).with_name("tiercel")


class LMCacheServer:
    """`lmcache server` in the mode that is fastest here: engines copy into its shared memory themselves."""

    def __init__(self, python: Path, folder: Path, name: str, ram_gib: int, *, files: bool) -> None:
        self.port, http, prometheus = free_ports(3)
        self.http = f"http://127.0.0.1:{http}"
        self.files = folder / f"{name}-files" if files else None
        call = [str(python.with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(self.port)]
        call += ["--http-port", str(http), "--prometheus-port", str(prometheus), "--eviction-policy", "LRU"]
        call += ["--l1-size-gb", str(ram_gib), "--l1-init-size-gb", str(ram_gib), "--no-l1-use-lazy"]
        call += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"bench{self.port}"]
        if self.files:
            self.files.mkdir(parents=True)
            tier = {"type": "fs_native", "base_path": str(self.files), "num_workers": 4}
            call += ["--l2-adapter", json.dumps(tier)]
        env = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
        self.child = Child(name, call, env, folder / f"{name}.log")
        self.child.wait_until(self._healthy)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http}/healthcheck", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def connector(self) -> dict[str, Any]:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
            },
        }

    def empty_ram(self) -> None:
        """Forget what is in memory, and drop its files from the page cache."""
        assert self.files
        ask = urllib.request.Request(
            f"{self.http}/cache/clear",
            data=json.dumps({"tier": "l1"}).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(ask, timeout=30) as answer:
            assert answer.status == 200
        drop_page_cache(self.files)

    def pending_writes(self) -> int:
        """LMCache does not say; the number of files standing still for a moment is taken for an answer."""
        assert self.files
        before = self._file_bytes()
        time.sleep(1.0)
        return self._file_bytes() - before

    def _file_bytes(self) -> int:
        assert self.files
        total = 0
        for path in self.files.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def read_blocks(self) -> int:
        """Not told either: after `empty_ram` there is nowhere else to read from."""
        return time.monotonic_ns()

    def stop(self) -> None:
        self.child.stop()
        Path(f"/dev/shm/lmcache_l1_pool_bench{self.port}").unlink(missing_ok=True)


class TiercelDaemon:
    """`tiercel daemon`, with a file tier if asked."""

    def __init__(self, folder: Path, name: str, ram: str, *, files: bool) -> None:
        self.socket = folder / f"{name}.sock"
        self.files = folder / f"{name}-files" if files else None
        settings = {"daemon.socket": self.socket, "ram.size": ram}
        if self.files:
            settings |= {"tiers.0.path": self.files, "tiers.0.size": "20GB"}
        call = [str(TIERCEL), "daemon"]
        for key, value in settings.items():
            call += ["--set", f"{key}={value}"]
        self.child = Child(name, call, {}, folder / f"{name}.log")
        self.child.wait_until(self._listens)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as one:
            return one.connect_ex(str(self.socket)) == 0

    def connector(self) -> dict[str, Any]:
        return {
            "kv_connector": "TiercelConnector",
            "kv_connector_module_path": "tiercel.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"daemon.socket": str(self.socket)},
        }

    def empty_ram(self) -> None:
        """Nothing to ask for: this arm's memory is smaller than what is read between two uses of a prompt."""
        assert self.files
        drop_page_cache(self.files)

    def pending_writes(self) -> int:
        return int(self._tier()["pending_writes"])

    def read_blocks(self) -> int:
        """Blocks read from the file tier since the daemon started."""
        return int(self._tier()["counters"]["read_blocks"])

    def _tier(self) -> dict[str, Any]:
        call = [str(TIERCEL), "daemon", "--socket", str(self.socket), "status", "--json"]
        done = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, timeout=30)
        tier: dict[str, Any] = json.loads(done.stdout)["stats"]["tiers"][0]
        return tier

    def stop(self) -> None:
        self.child.stop()


class Example:
    """No server: vLLM's example connector writes files of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "example"
        self.child: Child | None = None

    def connector(self) -> dict[str, Any]:
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder)},
        }

    def stop(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
