"""A client process under load: threads that look up, load and store over and over, and check every byte.

Prints "ready", goes on until its input ends, then prints what it saw as one JSON line.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.store.support import PAYLOAD, chain, get, put

from tiercel.config import Config
from tiercel.service import connect

BLOCKS = 6
# More than RAM and disk of the daemon hold: there is always something to store, to load and to miss.
PROMPTS = 120
DEADLINE_S = 2.0
THREADS = 4


@dataclass
class Seen:
    """What one process saw; `slowest_s` of a single call."""

    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, since_s: float, **more: int) -> None:
        with self.lock:
            self.counts[what] += 1
            self.counts.update(more)
            self.slowest_s = max(self.slowest_s, time.monotonic() - since_s)


def main(path: Path, number: int) -> None:
    store = connect(Config.load(None, {}, {"daemon.socket": str(path)}), PAYLOAD)
    seen, stop = Seen(), threading.Event()

    def work(thread: int) -> None:
        turn = thread
        try:
            while not stop.is_set():
                prompt = chain(BLOCKS, seed=1 + turn % PROMPTS)
                turn += 7
                started_s = time.monotonic()
                blocks = store.lookup(prompt, 0.05).blocks
                seen.note("lookups", started_s, found=blocks)
                started_s = time.monotonic()
                sources = get(store, prompt, DEADLINE_S)  # type: ignore[arg-type]
                seen.note("loads", started_s, hits=len(sources))
                if len(sources) < BLOCKS:
                    started_s = time.monotonic()
                    stored = put(store, prompt, len(sources), DEADLINE_S)  # type: ignore[arg-type]
                    seen.note("stores", started_s, stored=stored)
                # While the daemon is away a call is a comparison: thousands of those would tell nothing.
                time.sleep(0.001)
        except BaseException as fault:
            seen.faults.append(f"{type(fault).__name__}: {fault}")
            raise

    threads = [threading.Thread(target=work, args=(number * THREADS + one,)) for one in range(THREADS)]
    for one in threads:
        one.start()
    print("ready", flush=True)
    sys.stdin.read()
    stop.set()
    for one in threads:
        one.join()
    store.close()
    print(json.dumps({"slowest_s": seen.slowest_s, "faults": seen.faults, **seen.counts}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
