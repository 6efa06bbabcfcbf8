"""What figures cost: reporting a request, and being looked at, against the time of a small request.

    python -m benchmarks.figures            (ARGS: --requests 20000 --json FILE)

The small request is 256 prompt tokens and one token of answer of the demo model, all computed, on one core.
All times are CPU time of this process, in which both sides of the daemon's socket run, so that other work on
the machine matters little. `account` is all that vLLM's scheduler thread does for the report of a request.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.timing import publish
from tiercel.blocks import Identity, Scope, record_bytes
from tiercel.config import Config
from tiercel.engines.vllm.accounts import Accounts
from tiercel.engines.vllm.asker import Ask
from tiercel.memory import Arena, ArenaKind
from tiercel.service import Daemon, connect
from tiercel.service.prometheus import StoreCollector
from tiercel.store import Decision, Hit, LaneOptions, TieredStore
from tiercel.tiers import FilesTier

PAYLOAD = 4096
BLOCKS, CHAINS = 16, 256
# Prometheus scrapes every 15 s; a dashboard looks every second, and a store looks anew every 3.
SCRAPE_S, LOOK_S, LOOK_ANEW_S = 15.0, 1.0, 3.0


def decision() -> Decision:
    return Decision(
        prompt_tokens=4096, block_tokens=256, reason="16 blocks found (16 in ram) and loaded",
        found={"ram": 16}, loaded={"ram": 16}, reused_tokens={"ram": 3840}, computed_tokens=256,
        lookup_s=0.001, load_s=0.01, prefill_s=0.2, action="load", engine="bench", ttft_s=0.25, saved_s=1.0,
        spent_s=0.011, done=True,
    )  # fmt: skip


def filled(folder: Path) -> TieredStore:
    """A store of 4,096 blocks in RAM and on disk, in 256 prompts that share their beginnings."""
    arena = Arena(record_bytes(PAYLOAD), BLOCKS * CHAINS + 64, reserved=16, kind=ArenaKind.SHARED)
    store = TieredStore(arena, [(FilesTier(folder), LaneOptions())])
    scope = Scope(Identity("bench", "1", "bf16", b"g", "layout/1", 4))
    for number in range(CHAINS):
        tokens = [*range(32), *range(1000 * number, 1000 * number + 4 * BLOCKS - 32)]
        chain = scope.chain(tokens)
        with store.begin_store(chain, 0, len(chain), PAYLOAD) as lease:
            for _ in lease:
                pass
            lease.commit()
    store.flush(60)
    return store


class Request:
    """What an account reads of a request of vLLM's."""

    request_id, num_prompt_tokens, num_preemptions = "r", 4096, 0
    num_computed_tokens, num_output_tokens = 3840, 1


def account(accounts: Accounts, ask: Ask) -> None:
    """A request from the scheduler's first word of it to its first token."""
    request: Any = Request()
    accounts.began(request)
    accounts.waits("r")
    accounts.matched("r", 0, ask)
    accounts.loading("r", 3840)
    accounts.scheduled({"r": 256})
    accounts.ended(["r"])


def seconds_each(call: Callable[[], object], count: int) -> float:
    """The middle of five rounds."""
    rounds = []
    for _ in range(5):
        began_s = time.process_time()
        for _ in range(count):
            call()
        rounds.append((time.process_time() - began_s) / count)
    return statistics.median(rounds)


def small_request_s() -> float:
    """The time of a small request on the demo model, with one thread."""
    import torch

    from tiercel.engines.transformers import Request, TransformersEngine
    from tiercel.models import demo_model_dir

    torch.set_num_threads(1)
    engine = TransformersEngine(demo_model_dir())
    times = []
    for number in range(12):
        began_s = time.process_time()
        for _ in engine.generate(Request([100 + number] * 256, max_new_tokens=1)):
            pass
        times.append(time.process_time() - began_s)
    return statistics.median(times[2:])


def measure(requests: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with filled(folder / "disk") as store:
        one = decision()
        found["report_us"] = seconds_each(lambda: store.report(one), requests // 5) * 1e6
        registry = CollectorRegistry()
        registry.register(StoreCollector(store.stats))
        found["scrape_us"] = seconds_each(lambda: generate_latest(registry), 50) * 1e6
        found["stats_us"] = seconds_each(store.stats, 500) * 1e6
        found["overview_us"] = seconds_each(lambda: looked(store), 20) * 1e6
        found["overview_kept_us"] = seconds_each(store.overview, 50) * 1e6
        config = Config.load(None, {}, {"daemon.socket": str(folder / "s"), "ram.size": "1MiB"})
        daemon = Daemon(config, folder / "s")
        daemon._store = store
        thread = threading.Thread(target=daemon.run, daemon=True)
        thread.start()
        with connect(config, PAYLOAD) as client:

            def report_and_rest() -> None:
                client.report(one)
                time.sleep(0.001)

            rest_s = seconds_each(lambda: time.sleep(0.001), 500)
            found["report_to_daemon_us"] = max(0.0, seconds_each(report_and_rest, 500) - rest_s) * 1e6
            ask = Ask("r", b"", None)
            ask.hit = Hit(("ram",) * 15)
            accounts = Accounts(lambda _: None, 256)
            found["account_us"] = seconds_each(lambda: account(accounts, ask), 2000) * 1e6
            found["lost"] = client.stats().requests.lost
        daemon.stop()
        thread.join()
    return found


def looked(store: TieredStore) -> None:
    """An overview that looks anew."""
    store._watch._looked_s = -1e9
    store.overview()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000, help="how many to report")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tiercel-figures-") as folder:
        found = measure(options.requests, Path(folder))
    found["request_s"] = small_request_s()
    found["report_share"] = found["report_us"] / 1e6 / found["request_s"]
    found["report_to_daemon_share"] = found["report_to_daemon_us"] / 1e6 / found["request_s"]
    found["scrape_share"] = found["scrape_us"] / 1e6 / SCRAPE_S
    found["dashboard_share"] = (found["overview_us"] / LOOK_ANEW_S + found["overview_kept_us"] / LOOK_S) / 1e6
    publish(found, options.json)


if __name__ == "__main__":
    main()
