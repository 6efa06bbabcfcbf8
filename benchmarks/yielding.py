"""What writing in the background costs a prefill that uses all cores, by the writer's priority.

    python -m benchmarks.yielding [--json FILE] [--dir DIR] [--tokens N] [--rounds N]

A thread writes blocks to a tier without pause while the engine computes a prompt, the worst that a burst of
stores can do; with direct I/O alone, and encrypted, which takes a core. In turn with computing alone. `mb_s`
is what was written meanwhile.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.core import chain_of
from benchmarks.run import machine
from benchmarks.timing import publish, ratio, shown
from benchmarks.ttft import first_token, prompts
from tiercel.blocks import payload_of, record_bytes, seal
from tiercel.engines.transformers import TransformersEngine
from tiercel.memory import Arena
from tiercel.models import demo_model_dir
from tiercel.tiers import FilesTier, Tier
from tiercel.tiers.encrypted import encrypted
from tiercel.tiers.keyring import KeyRing

BLOCKS = 4
NICE = (0, 5, 10, 19)


class Writer:
    """Writes the same few records again and again."""

    def __init__(self, payload_bytes: int) -> None:
        self._chain = chain_of(BLOCKS)
        self._arena = Arena(record_bytes(payload_bytes), BLOCKS)
        self._records = [self._arena.view(slot) for slot in range(BLOCKS)]
        for index, record in enumerate(self._records):
            payload_of(record, payload_bytes)[:] = os.urandom(payload_bytes)
            seal(record, self._chain, index, payload_bytes, time.time_ns())
        self._written = 0

    @contextmanager
    def writing(self, tier: Tier, nice: int) -> Iterator[list[float]]:
        """Write as long as the context lasts; the list gets the bytes per second at its end."""
        stop, begun = threading.Event(), threading.Event()
        rate: list[float] = []

        def run() -> None:
            if nice:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
            self._written = 0
            started = time.perf_counter()
            while not stop.is_set():
                tier.write(self._chain.keys, self._records)
                self._written += sum(len(record) for record in self._records)
                begun.set()
            rate.append(self._written / (time.perf_counter() - started))

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        yield rate
        stop.set()
        thread.join()


def measure(folder: Path, tokens: int, rounds: int) -> dict[str, Any]:
    engine = TransformersEngine(demo_model_dir(os.environ))
    text = prompts(engine, tokens)[0]
    writer = Writer(engine.layout.payload_bytes)
    keys = KeyRing([("bench", secrets.token_bytes(32))])
    tiers: dict[str, Tier] = {
        "plain": FilesTier(folder / "plain"),
        "encrypted": encrypted(FilesTier(folder / "encrypted"), keys),
    }
    first_token(engine, text, use_cache=False)
    alone: list[float] = []
    beside: dict[tuple[str, int], list[float]] = {(kind, nice): [] for kind in tiers for nice in NICE}
    rates: dict[tuple[str, int], list[float]] = {arm: [] for arm in beside}
    for _ in range(rounds):
        alone.append(first_token(engine, text, use_cache=False).timing.ttft_s)
        for (kind, nice), times in beside.items():
            with writer.writing(tiers[kind], nice) as rate:
                times.append(first_token(engine, text, use_cache=False).timing.ttft_s)
            rates[kind, nice] += rate
    return {
        "tokens": tokens,
        "alone": shown(alone),
        "beside": [
            {
                "tier": kind,
                "nice": nice,
                "of_alone": ratio(times, alone),
                "mb_s": shown(rates[kind, nice])["median_s"] / 1e6,
            }
            for (kind, nice), times in beside.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory(prefix="yielding-", dir=options.dir) as folder:
        results = {"machine": before, **measure(Path(folder), options.tokens, options.rounds)}
    publish(results, options.json)


if __name__ == "__main__":
    main()
