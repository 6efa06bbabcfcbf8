"""D31: kill -9 at every step of writing, fifty times, through the real store; what is left is never wrong."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercel.blocks import Chain, Identity, Scope, payload_of, record_bytes
from tiercel.memory import Arena
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.inspect import CachePlace
from tiercel.tiers import FilesTier

SOURCE = Path(__file__).parents[2]
BLOCKS = 12
PAYLOAD_BYTES = 1 << 20
IDENTITY = Identity(
    model="crash", revision="r1", kv_dtype="bfloat16", geometry=bytes(16), layout="test-1", block_tokens=4
)
# Forks one writer per line read, so that only this process pays for the imports. A writer told a number
# kills itself at its n-th step of writing (halfway through it, for the bytes); one told 0 is killed by us.
LAUNCHER = """
    import itertools, json, os, signal, sys
    sys.path[:0] = [{source!r}]
    from pathlib import Path
    from tests.tiers.test_crash import open_store, write_blocks

    def die_at(step):
        steps = itertools.count(1)
        def wrap(name, half):
            real = getattr(os, name)
            def call(*args, **named):
                if name == "open" and not str(args[0]).endswith(".tmp"):
                    return real(*args, **named)
                if next(steps) == step:
                    if half:
                        real(args[0], [args[1][0][:len(args[1][0]) // 2]], *args[2:])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **named)
            setattr(os, name, call)
        for name in ("open", "pwritev", "utime", "rename"):
            wrap(name, name == "pwritev")

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            if order["step"]:
                die_at(order["step"])
            print(os.getpid(), flush=True)
            with open_store(Path(order["root"])) as store:
                for turn in itertools.count():
                    write_blocks(store, order["seed"] + turn)
            os._exit(0)
        os.waitpid(pid, 0)
        print("dead", flush=True)
"""


def open_store(root: Path) -> TieredStore:
    arena = Arena(record_bytes(PAYLOAD_BYTES), 2 * BLOCKS, reserved=2)
    return TieredStore(arena, [(FilesTier(root), LaneOptions(cap_bytes=1 << 30))])


def write_blocks(store: TieredStore, seed: int) -> None:
    """Store a chain whose every byte follows from `seed` and the block's index, and wait until it is down."""
    chain = chain_of(seed)
    lease = store.begin_store(chain, 0, BLOCKS, PAYLOAD_BYTES, deadline_s=10)
    with lease:
        for block in lease:
            block.payload[:] = payload(seed, block.index)
        lease.commit()
    store.flush(10)


def chain_of(seed: int) -> Chain:
    return Scope(IDENTITY).chain([seed] * 4 * BLOCKS)


def payload(seed: int, index: int) -> bytes:
    return bytes([seed % 256, index]) * (PAYLOAD_BYTES // 2)


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    code = textwrap.dedent(LAUNCHER).format(source=str(SOURCE))
    env = {**os.environ, "PYTHONPATH": f"{SOURCE / 'src'}"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def say(launcher: subprocess.Popen[str], **order: object) -> None:
    assert launcher.stdin is not None
    launcher.stdin.write(json.dumps(order) + "\n")
    launcher.stdin.flush()


def hear(launcher: subprocess.Popen[str]) -> str:
    assert launcher.stdout is not None
    ready, _, _ = select.select([launcher.stdout], [], [], 60)
    assert ready, "the writer said nothing for a minute"
    return launcher.stdout.readline().strip()


def test_d31_killed_fifty_times_while_writing(tmp_path: Path, launcher: subprocess.Popen[str]) -> None:
    root = tmp_path / "cache"
    randomly = random.Random(31)
    torn = served = 0
    for turn in range(50):
        step = turn + 1 if turn < 25 else 0
        seed = 100 * turn
        say(launcher, root=str(root), seed=seed, step=step)
        writer = int(hear(launcher))
        if not step:
            time.sleep(randomly.uniform(0.0, 0.1))
            os.kill(writer, signal.SIGKILL)
        assert hear(launcher) == "dead"
        torn += len(list(root.rglob("*.tmp")))
        served += check_what_is_left(root, seed)
        if turn % 10 == 9:
            CachePlace.directory(root).clear([chain_of(0).keys[0][:8]])
    assert torn >= 10, "hardly any writer was killed in the middle of a file"
    assert served >= 10, "hardly any block was ever there: this proves nothing"


def check_what_is_left(root: Path, seed: int) -> int:
    """Open the store as after a crash and read everything; returns how many blocks were served."""
    served = 0
    with open_store(root) as store:
        assert store.scanned(30)
        assert list(root.rglob("*.tmp")) == []
        on_disk = [path.stat().st_size for path in root.rglob("*.kv")]
        (tier,) = store.stats().tiers
        assert (tier.blocks, tier.used_bytes) == (len(on_disk), sum(on_disk))
        for turn in range(4):
            chain = chain_of(seed + turn)
            with store.acquire(chain) as lease:
                for block in lease:
                    assert bytes(block.payload) == payload(seed + turn, block.index)
                    served += 1
        (tier,) = store.stats().tiers
        assert (tier.counters.corrupt, tier.counters.failed) == (0, 0)
    report = CachePlace.directory(root).verify(repair=False)
    assert (report.bad, report.leftovers, report.checked) == ([], 0, len(on_disk))
    return served


def test_the_bytes_of_the_check_are_what_a_writer_writes(tmp_path: Path) -> None:
    with open_store(tmp_path / "cache") as store:
        write_blocks(store, 7)
    assert check_what_is_left(tmp_path / "cache", 7) == BLOCKS
    (path, *_) = (tmp_path / "cache").rglob("*.kv")
    raw = bytearray(path.read_bytes())
    payload_of(memoryview(raw), PAYLOAD_BYTES)[12345] ^= 1
    path.write_bytes(raw)
    with pytest.raises(AssertionError):
        check_what_is_left(tmp_path / "cache", 7)
