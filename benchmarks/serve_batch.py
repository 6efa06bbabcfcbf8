"""What `--batch` brings and costs: one server per size, asked in turn by several clients at once.

    python -m benchmarks.serve_batch [--json FILE] [--sizes 1,4,8] [--clients N] [--answer N] [--rounds N]

Every client sends a short prompt of its own and hears an answer of so many tokens, all at once; then the next
server is asked the same. Nothing is reused. The table has medians over the rounds; times to the first token
and between tokens are of all answers of all rounds. Last, one client listens to an answer while another one's
long prompt is read: its longest pause is what such a prompt costs those who are being answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.run import machine
from benchmarks.timing import publish
from tiercel.bench.stop import Stop
from tiercel.cli.bench_servers import StartedSide
from tiercel.models import demo_model_dir

# Greedy, the demo model goes on counting for as long as it may.
COUNT = ", ".join(str(number) for number in range(1, 41)) + ","
HINTS = {"no_load": True, "no_store": True}
READY_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; without it the demo model")
    parser.add_argument("--sizes", default="1,4,8", help="values of --batch")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--long", type=int, default=2000, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sizes = [int(one) for one in options.sizes.split(",")]
    model = options.model or demo_model_dir(os.environ, print)
    results = measured(model, sizes, options.clients, options.answer, options.long, options.rounds)
    publish(results, options.json)
    print("\n" + "\n".join(table(results)))


def measured(
    model: Path, sizes: Sequence[int], clients: int, answer_tokens: int, long_tokens: int, rounds: int
) -> dict[str, Any]:
    """The figures of every size."""
    with ExitStack() as servers:
        folder = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        urls = {size: servers.enter_context(served(model, size, folder)) for size in sizes}
        for url in urls.values():  # the first answers of a server are slower
            asyncio.run(crowd(url, clients, 4, 0))
        asked: dict[int, list[Crowd]] = {size: [] for size in sizes}
        pauses: dict[int, list[float]] = {size: [] for size in sizes if size > 1}
        for number in range(1, rounds + 1):
            for size, url in urls.items():
                asked[size].append(asyncio.run(crowd(url, clients, answer_tokens, number)))
            for size, heard in pauses.items():
                heard.append(asyncio.run(pause(urls[size], answer_tokens, long_tokens, number)))
    return {
        "machine": machine(),
        "clients": clients,
        "answer_tokens": answer_tokens,
        "long_tokens": long_tokens,
        "rounds": rounds,
        "sizes": {str(size): row(crowds) for size, crowds in asked.items()},
        "longest_pause_s": {str(size): statistics.median(heard) for size, heard in pauses.items()},
    }


@contextmanager
def served(model: Path, size: int, folder: Path) -> Iterator[str]:
    """The address of a server that answers `size` requests together."""

    def command(port: int) -> list[str]:
        flags = ["--engine", "transformers", "--port", str(port), "--batch", str(size), "--ram", "256MiB"]
        return [sys.executable, "-m", "tiercel", "serve", str(model), *flags]

    side = StartedSide(
        f"batch {size}", "", command, dict(os.environ), log=folder / f"{size}.log", ready_deadline_s=READY_S,
        stop=Stop(),
    )  # fmt: skip
    try:
        yield side.begin().url
    finally:
        side.end()


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer: when it was asked for, when each piece of it came, and its tokens as the server counted."""

    sent_s: float
    pieces_s: tuple[float, ...]
    tokens: int

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.tokens - 1)

    @property
    def longest_pause_s(self) -> float:
        return max(late - early for early, late in zip(self.pieces_s, self.pieces_s[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Crowd:
    """What all clients heard in one round, and how long it took them together."""

    answers: tuple[Heard, ...]
    took_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(one.tokens for one in self.answers) / self.took_s


async def crowd(url: str, clients: int, answer_tokens: int, number: int) -> Crowd:
    """All clients at once, each with a prompt that no other round and no other client has."""
    started_s = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        prompts = [f"Notes of {words(20, f'{number} {at}')}: {COUNT}" for at in range(clients)]
        answers = await asyncio.gather(*(answer(http, prompt, answer_tokens) for prompt in prompts))
    return Crowd(tuple(answers), time.perf_counter() - started_s)


async def pause(url: str, answer_tokens: int, long_tokens: int, number: int) -> float:
    """The longest pause that somebody hears while another one's long prompt is read."""
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        begun = asyncio.Event()
        listening = asyncio.create_task(answer(http, f"Listen to {number}: {COUNT}", answer_tokens, begun))
        await begun.wait()
        prompt = [1000 + random.Random(f"{number} {at}").randrange(10_000) for at in range(long_tokens)]
        _, heard = await asyncio.gather(answer(http, prompt, 2), listening)
    return heard.longest_pause_s


async def answer(
    http: httpx.AsyncClient, prompt: str | list[int], tokens: int, begun: asyncio.Event | None = None
) -> Heard:
    """One streamed answer; `begun` is set with its first token."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "tiercel": HINTS,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    sent_s, pieces_s, counted = time.perf_counter(), [], 0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = msgspec.json.decode(line[6:])
            if chunk["choices"]:
                pieces_s.append(time.perf_counter())
            else:
                counted = chunk["usage"]["completion_tokens"]
            if begun is not None:
                begun.set()
    return Heard(sent_s, tuple(pieces_s), counted)


def words(count: int, seed: str) -> str:
    """Words that no other prompt begins with."""
    draw = random.Random(seed)
    return " ".join(str(draw.randrange(10_000)) for _ in range(count))


def row(crowds: Sequence[Crowd]) -> dict[str, float]:
    """The figures of one size."""
    answers = [one for each in crowds for one in each.answers]
    ttft_s = sorted(one.ttft_s for one in answers)
    return {
        "tokens_per_s": statistics.median(one.tokens_per_s for one in crowds),
        "tokens_per_answer": statistics.mean(one.tokens for one in answers),
        "ttft_p50_s": statistics.median(ttft_s),
        "ttft_p99_s": ttft_s[min(len(ttft_s) - 1, int(0.99 * len(ttft_s)))],
        "tpot_p50_s": statistics.median(one.tpot_s for one in answers),
    }


def table(results: dict[str, Any]) -> list[str]:
    """The figures as a table for docs/serve.md."""
    lines = [
        "| `--batch` | tokens per second | TTFT p50 | TTFT p99 | TPOT p50 | longest pause |",
        "|---|---|---|---|---|---|",
    ]
    for size, one in results["sizes"].items():
        paused = results["longest_pause_s"].get(size)
        lines.append(
            f"| {size} | {one['tokens_per_s']:.1f} | {one['ttft_p50_s']:.2f} s | {one['ttft_p99_s']:.2f} s "
            f"| {one['tpot_p50_s'] * 1e3:.0f} ms | {'none' if paused is None else f'{paused:.2f} s'} |"
        )
    of = results["machine"]
    answers = {one["tokens_per_answer"] for one in results["sizes"].values()}
    told = " to ".join(f"{one:.0f}" for one in sorted({min(answers), max(answers)}))
    lines += [
        "",
        f"{results['clients']} clients at once, {told} tokens an answer, {results['rounds']} rounds; long "
        f"prompt: {results['long_tokens']} tokens. {of['when']}, {of['cpu']}, {of['cores']} cores; load "
        f"{of['load_before']:.1f}.",
    ]
    return lines


if __name__ == "__main__":
    main()
