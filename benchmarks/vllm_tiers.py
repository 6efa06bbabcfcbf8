"""The first request of a second vLLM whose daemon shares one tier with the first one's, and nothing else.

make bench-tiers                                   figures of all tiers into docs/, nothing else running
python -m benchmarks.vllm_tiers --quick            shorter prompts, one round; figures are written nowhere
python -m benchmarks.vllm_tiers --kinds files,valkey --json FILE

The first engine computes and stores in every place, and ends with its daemon. The second has, place by place,
a new daemon with that tier alone and nothing in RAM. One engine is alive at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.servers.places import KINDS, Places, why_not
from tests.service.running import Running

from benchmarks import tiers_page
from benchmarks.run import FOLDER, ROOT, machine
from benchmarks.vllm.arms import ENVIRONMENT, SETTLE_S, Setup
from benchmarks.vllm.driver import ArmFailed, EngineProcess, drop_page_cache
from benchmarks.vllm.measure import prompt_of, reusable
from tiercel.models import demo_model_dir
from tiercel.service import RemoteStore
from tiercel.service.connecting import reach

LENGTHS, ROUNDS = (2112, 8000), 3
QUICK_LENGTHS, QUICK_ROUNDS = (1088, 2112), 1
# One block of the demo model in bf16, so that the store opens before the engine comes.
SLOT = "3MiB"
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its TTFT, and what was moved and spent for it by the engine, the daemon, the servers."""

    seconds: float
    token: int
    reused: int
    read_bytes: int
    cpu_s: tuple[float, float, float]


class Host:
    """One engine and its daemon. Daemons come and go on one socket; the engine stays."""

    def __init__(self, name: str, setup: Setup, places: Places, unrelated: int) -> None:
        self.socket = setup.folder / f"{name}.sock"
        self._setup, self._places, self._name = setup, places, name
        self._engine: EngineProcess | None = None
        # The number of the next prompt for warming up: two hosts must not know each other's.
        self._unrelated = unrelated

    @contextmanager
    def on(self, *kinds: str, **more: str) -> Iterator[RemoteStore]:
        """A new daemon with these tiers, found and warmed up by the engine."""
        settings = [f"ram.size={self._setup.ram_gib}GiB", f"ram.slot={SLOT}", "store.flush_deadline=2m"]
        tiers = self._places.settings(*kinds, **more)
        where = {"before": self._places.before, "env": self._places.environ}
        with Running(self.socket, *settings, *tiers, **where) as self._daemon, reach(self.socket) as store:
            self._store = store
            if self._engine is None:
                self._engine = self._start()
            # Both sides of the connector have come by when one has looked up and the other stored.
            wait_until(lambda: self._warm() and counted(store, "lookups") and counted(store, "stored"))
            self._warm()
            yield store
            assert self._daemon.end() == 0

    def _start(self) -> EngineProcess:
        connector = {
            "kv_connector": "TiercelConnector",
            "kv_connector_module_path": "tiercel.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"daemon.socket": str(self.socket)},
        }
        log = self._setup.folder / f"{self._name}.log"
        options = self._setup.engine_options(connector)
        engine = EngineProcess(self._name, Path(sys.executable), options, ENVIRONMENT, log)
        engine.wait_ready()
        return engine

    def _warm(self) -> bool:
        self._unrelated += 1
        self.ask(prompt_of(300, self._unrelated))
        self.settle()
        return True

    def ask(self, tokens: list[int]) -> Asked:
        assert self._engine
        cpu_s, read_bytes = self._cpu_s(), self._read_bytes()
        answer = self._engine.ask("ttft", tokens=tokens)
        spent = [after - before for before, after in zip(cpu_s, self._cpu_s(), strict=True)]
        moved = self._read_bytes() - read_bytes
        return Asked(
            answer["seconds"], answer["token"], answer["reused"], moved, (spent[0], spent[1], spent[2])
        )

    def settle(self) -> None:
        """Let everything be saved, then empty vLLM's own cache."""
        assert self._engine
        time.sleep(SETTLE_S)
        self._engine.ask("reset")
        wait_until(lambda: not any(tier.pending_writes for tier in self._store.stats().tiers))

    def _read_bytes(self) -> int:
        return sum(tier.counters.read_bytes for tier in self._store.stats().tiers)

    def _cpu_s(self) -> tuple[float, float, float]:
        assert self._engine
        daemon = psutil.Process(self._daemon.process.pid).cpu_times()
        return self._engine.cpu_seconds(), daemon.user + daemon.system, self._places.cpu_seconds()

    def stop(self) -> None:
        if self._engine:
            self._engine.stop()


def counted(store: RemoteStore, name: str) -> int:
    return int(getattr(store.stats().counters, name))


def wait_until(done: Callable[[], object]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > until_s:
            raise ArmFailed(f"not done within {WAIT_S:.0f} s")
        time.sleep(0.1)


def store_everywhere(host: Host, kinds: Sequence[str], lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Compute every prompt and write it to all places; first tokens of vLLM's own hit, by prompt."""
    tokens: dict[tuple[int, int], int] = {}
    with host.on(*kinds) as store:
        for number in range(rounds):
            for length in lengths:
                host.ask(prompt_of(length, number))
                tokens[length, number] = host.ask(prompt_of(length, number)).token
                host.settle()
        written = {tier.name: tier for tier in store.stats().tiers}
    say(", ".join(f"{name}: {tier.counters.written_bytes / 1e6:.0f} MB" for name, tier in written.items()))
    lost = sum(tier.counters.writes_dropped + tier.counters.failed for tier in written.values())
    return {"tokens": tokens, "blocks": min(tier.blocks for tier in written.values()), "lost": lost}


def read_back(
    host: Host, kinds: Sequence[str], lengths: Sequence[int], rounds: int, blocks: int, files: Path
) -> dict[str, dict[tuple[int, int], list[Asked]]]:
    """Every prompt once from every place; in between prompts never seen, and those in vLLM's own cache."""
    found: dict[str, dict[tuple[int, int], list[Asked]]] = {"computed": {}, "own": {}}
    for turn, kind in enumerate(kinds):
        say(kind)
        found[kind] = {}
        with host.on(kind, write="off") as store:
            wait_until(lambda store=store: store.stats().tiers[0].blocks >= blocks)  # type: ignore[misc]
            if kind == "files":
                drop_page_cache(files)
            for number in range(rounds):
                for length in lengths:
                    found[kind][length, number] = [host.ask(prompt_of(length, number))]
                    host.settle()
            for length in lengths if turn < rounds else ():
                found["computed"][length, turn] = [host.ask(prompt_of(length, 1000 + turn))]
                time.sleep(SETTLE_S)
                found["own"][length, turn] = [host.ask(prompt_of(length, 1000 + turn))]
                host.settle()
    return found


def summary(asked: Sequence[Asked], computed_s: float) -> dict[str, Any]:
    times = [one.seconds for one in asked]
    median_s = statistics.median(times)
    cpu = [statistics.median(one.cpu_s[part] for one in asked) for part in range(3)]
    return {
        "median_s": median_s,
        "min_s": min(times),
        "max_s": max(times),
        "faster_than_computing": computed_s / median_s,
        "read_bytes": statistics.median(one.read_bytes for one in asked),
        "reused_tokens": [one.reused for one in asked],
        "cpu_s": dict(zip(("engine", "daemon", "servers"), cpu, strict=True)),
    }


def figures(found: dict[str, dict[tuple[int, int], list[Asked]]], lengths: Sequence[int]) -> dict[str, Any]:
    """Per prompt length and arm. Ratios are of medians: an arm's prompts are measured in a row."""
    shown: dict[str, Any] = {}
    for length in lengths:
        arms = {
            arm: [one for (size, _), asked in samples.items() if size == length for one in asked]
            for arm, samples in found.items()
        }
        computed_s = statistics.median(one.seconds for one in arms["computed"])
        shown[str(length)] = {arm: summary(asked, computed_s) for arm, asked in arms.items()}
    return shown


def run(setup: Setup, kinds: Sequence[str], lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        say("servers")
        places = stack.enter_context(Places(setup.folder / "places", kinds))
        first = Host("first", setup, places, 10_000)
        stack.callback(first.stop)
        say("the first engine")
        stored = store_everywhere(first, kinds, lengths, rounds)
        first.stop()
        # What servers have written must not be on its way to the disk while files are read from it.
        os.sync()
        second = Host("second", setup, places, 20_000)
        stack.callback(second.stop)
        say("the second engine")
        files = setup.folder / "places" / "files"
        found = read_back(second, kinds, lengths, rounds, stored["blocks"], files)
    hits = [(at, one) for kind in kinds for at, asked in found[kind].items() for one in asked]
    return {
        "rounds": rounds,
        "ttft": figures(found, lengths),
        "hits": len(hits),
        "short_hits": sum(one.reused < reusable(length) for (length, _), one in hits),
        "same_first_token": sum(one.token == stored["tokens"][at] for at, one in hits),
        "writes_lost": stored["lost"],
    }


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.vllm_tiers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="shorter prompts, one round; writes no figures")
    parser.add_argument("--kinds", help=f"some of: {', '.join(KINDS)}")
    parser.add_argument("--json", type=Path, help="write the figures here, and leave docs/ as they are")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / ".cache", help="a directory on the disk to measure"
    )
    options = parser.parse_args()
    asked = options.kinds.split(",") if options.kinds else list(KINDS)
    if unknown := [kind for kind in asked if kind not in KINDS]:
        parser.error(f"--kinds: {', '.join(unknown)}: accepted are {', '.join(KINDS)}")
    absent = {kind: reason for kind in asked if (reason := why_not(kind))}
    kinds = [kind for kind in asked if kind not in absent]
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-tiers-", dir=options.dir))
    model = demo_model_dir(os.environ, print)
    setup = Setup(folder=folder, model=model, lmcache=None, ram_gib=2, small_ram_mib=0)
    lengths, rounds = (QUICK_LENGTHS, QUICK_ROUNDS) if options.quick else (LENGTHS, ROUNDS)
    try:
        results = {"machine": machine(), **run(setup, kinds, lengths, rounds), "absent": absent}
    except ArmFailed as fault:
        sys.exit(f"benchmarks.vllm_tiers: {fault}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(tiers_page.of_vllm(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    elif not options.quick and not options.kinds:
        (FOLDER / "vllm_tiers.json").write_text(json.dumps(results, indent=2) + "\n")
        tiers_page.write_page()


if __name__ == "__main__":
    main()
