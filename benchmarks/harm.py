"""Do no harm: TTFT with a throttled tier, against always computing and always loading, in one run.

    python -m benchmarks.harm --page      both engines, into docs/; about 10 minutes, nothing else running
    python -m benchmarks.harm --quick     short prompts, one round: an impression; writes nothing
    python -m benchmarks.harm --engines vllm --tokens 256,1024 --rounds 5 --json FILE

Every engine has one store whose RAM is emptied before every request, so that all comes from one tier whose
reads are slowed down to a link's latency and bandwidth. After each change of the link, without telling, its
earlier speed is unlearned by three requests, whose times are shown too: that is what learning costs.
`Turning slow` and `turning fast` change it in the middle and look at every request after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harm_page
from benchmarks.harm_engines import COMPUTE, ENGINES, LOAD, OURS, Arms
from benchmarks.run import FOLDER, ROOT, machine
from benchmarks.throttle import FAST, LINKS, SLOW, Link
from benchmarks.timing import publish

TOKENS, ROUNDS = (256, 1024, 4096, 8000), 3
QUICK_TOKENS, QUICK_ROUNDS = (256, 1024), 1
LEARNING, TURNING_TOKENS, TURNING = 3, 1024, 8
SHARING, SHARED_TOKENS = 50, 6000
# Longer than a tier that was priced out is left alone before one block of it is read again.
_TRIED_AGAIN_S = 6.0
# What takes longer to load is loaded for nobody: minutes for what is plain to see.
_LOAD_S_MAX = 12.0
# Up to so many tokens are computed as often as loaded: a tenth of a second is what a machine's mood changes.
_SHORT_TOKENS = 1024
_TOKEN_BYTES = 23040


def measure(arms: Arms, sizes: Sequence[int], rounds: int, *, quick: bool) -> dict[str, Any]:
    """Every link and size of one engine, and what happens when a link turns."""
    texts = {size: arms.prompt(size) for size in {*sizes, TURNING_TOKENS}}
    arms.tier.link = FAST
    for text in texts.values():
        arms.ttft(OURS, text)
    arms.written()
    computed: dict[int, list[float]] = {size: [] for size in texts}
    samples: dict[str, dict[int, dict[str, list[float]]]] = {}
    learning: dict[str, list[float]] = {}
    for name, link in LINKS.items():
        # In between, so that a machine's mood is in all arms alike.
        for size in sizes:
            if size > _SHORT_TOKENS:
                computed[size].append(arms.ttft(COMPUTE, texts[size]))
        arms.tier.link = link
        learning[name] = [arms.ttft(OURS, texts[sizes[len(sizes) // 3]]) for _ in range(LEARNING)]
        samples[name] = {size: arm_times(arms, link, texts[size], rounds) for size in sizes}
        say(f"{arms.name}: {name}")
    rows = [
        row(name, size, {COMPUTE: computed[size]} | samples[name][size]) for name in LINKS for size in sizes
    ]
    text = texts[TURNING_TOKENS]
    turns = {"slow": turning(arms, text, FAST, SLOW), "fast": turning(arms, text, SLOW, FAST)}
    shared = [] if quick else shared_prefix(arms)
    return {"rows": rows, "learning_s": learning, "turning_of_compute": turns, "shared": shared}


def arm_times(arms: Arms, link: Link, text: list[int], rounds: int) -> dict[str, list[float]]:
    names = [OURS]
    if link.latency_s + len(text) * _TOKEN_BYTES / link.bytes_per_s <= _LOAD_S_MAX:
        names.append(LOAD)
    if len(text) <= _SHORT_TOKENS:
        names.append(COMPUTE)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(arms.ttft(name, text))
    return times


def row(link: str, size: int, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(seen) for name, seen in times.items()}
    best_s = min(seconds for name, seconds in medians.items() if name != OURS)
    return {
        "link": link,
        "tokens": size,
        "median_s": medians,
        "min_s": {name: min(seen) for name, seen in times.items()},
        "max_s": {name: max(seen) for name, seen in times.items()},
        "of_the_better": medians[OURS] / best_s,
        "of_compute": medians[OURS] / medians[COMPUTE],
        "worst_of_compute": max(times[OURS]) / medians[COMPUTE],
    }


def turning(arms: Arms, text: list[int], before: Link, after: Link) -> list[float]:
    """TTFT of every request after the link has changed, of what computing takes around that time."""
    arms.tier.link = before
    for number in range(5):
        if number == 2 and before is FAST:
            time.sleep(_TRIED_AGAIN_S)
        arms.ttft(OURS, text)
    arms.tier.link = after
    seen, computed = [], []
    for number in range(TURNING):
        if number == 2 and after is FAST:
            time.sleep(_TRIED_AGAIN_S)
        computed.append(arms.ttft(COMPUTE, text))
        seen.append(arms.ttft(OURS, text))
    compute_s = statistics.median(computed)
    return [seconds / compute_s for seconds in seen]


def shared_prefix(arms: Arms) -> list[dict[str, Any]]:
    """Many requests at once that begin with the same long text, for engines that take many (D21)."""
    text = arms.prompt(SHARED_TOKENS)
    asked = [[*text, *text[number : number + 8]] for number in range(SHARING)]
    if not arms.together(OURS, asked):
        return []
    arms.written()
    rows = []
    for name, link in LINKS.items():
        arms.tier.link = link
        for _ in range(LEARNING):
            arms.ttft(OURS, arms.prompt(TURNING_TOKENS))
        computed = arms.together(COMPUTE, asked)
        arms.tier.read_keys.clear()
        ours = arms.together(OURS, asked)
        read = arms.tier.read_keys
        p99 = {COMPUTE: max(computed), OURS: max(ours)}
        rows.append({"link": name, "p99_s": p99, "read_blocks": len(read), "distinct": len(set(read))})
        say(f"{arms.name}: {SHARING} at once, {name}")
    return rows


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.harm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default=",".join(ENGINES), help="some of: " + ", ".join(ENGINES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="short prompts, one round")
    parser.add_argument("--page", action="store_true", help="write figures and table into docs/")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--dir", type=Path, default=ROOT / ".cache", help="a directory on a disk")
    options = parser.parse_args()
    sizes = QUICK_TOKENS if options.quick else tuple(sorted(map(int, options.tokens.split(","))))
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    results: dict[str, Any] = {"machine": machine(), "rounds": rounds, "engines": {}}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options.dir.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    for name in options.engines.split(","):
        with (
            tempfile.TemporaryDirectory(dir=options.dir, prefix="harm-") as folder,
            ENGINES[name](Path(folder)) as arms,
        ):
            results["engines"][arms.name] = measure(arms, sizes, rounds, quick=options.quick)
    results["took_s"] = time.monotonic() - started_s
    publish(results, FOLDER / "harm.json" if options.page else options.json)
    print(harm_page.table(results))
    if options.page:
        harm_page.write_page(json.loads((FOLDER / "harm.json").read_text()))


if __name__ == "__main__":
    main()
