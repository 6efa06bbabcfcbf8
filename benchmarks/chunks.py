"""Reuse of chunks on a real model: how far off answers are, by what is computed anew, and what it saves.

python -m benchmarks.chunks [--json FILE] [--report FILE] [--prompts 4]
python -m benchmarks.chunks --lengths     what chunks of few tokens earn in a block of the store

SmolLM2-135M in its own dtype; texts are those of `tiercel eval`. Three tasks: a text cut in two chunks of
1,000 tokens, four unrelated pieces of 500, and the list of 100 codes of `tiercel eval` cut in two. KL in nats
and agreement of the most likely token are over teacher-forced tokens behind the chunks (the text's next 200;
the list's answers), against a full prefill of the same prompt. Seconds are processor time of the one thread
that works, up to the first token: of a prompt with all chunks in RAM, and of the same computed in full, in
turn, the first round uncounted; `--prompts 0` measures these alone. `--report` writes what `tiercel serve`
takes as consent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import publish, ratio
from benchmarks.timing import shown as times_shown
from tiercel.bench.texts import Texts, find_texts
from tiercel.config import Config
from tiercel.engines.transformers import Request, TransformersEngine
from tiercel.engines.transformers.chunks import METHOD, ChunkReuse, Span
from tiercel.eval.figures import interval
from tiercel.eval.tasks import kv_list
from tiercel.models import demo_model_dir
from tiercel.store import TieredStore, open_store

BLOCK_TOKENS = 256
GOES_ON_TOKENS = 200
TIMED_ROUNDS = 2
# Of a block of 256 tokens; the shorter ones are what `ChunkReuse.worth` leaves out.
LENGTHS = (24, 40, 64, 96, 128, 256)
QUESTION = "\n\nIn one sentence, what is the text above about?"
UNMOVED = "not moved"
VARIANTS: dict[str, ChunkReuse] = {
    UNMOVED: ChunkReuse(0),
    **{
        str(one): one
        for one in (
            ChunkReuse(0),
            ChunkReuse(8),
            ChunkReuse(16),
            ChunkReuse(32),
            ChunkReuse(0, 0.05),
            ChunkReuse(0, 0.15),
            ChunkReuse(0, 0.30),
        )
    },
}


@dataclass(frozen=True, slots=True)
class Asked:
    """Chunks, one after the other, and the tokens behind them; `scored` are the places in `new` that count.

    `answers` are spans of `new` that are answers as a whole.
    """

    chunks: tuple[tuple[int, ...], ...]
    new: tuple[int, ...]
    scored: tuple[int, ...]
    answers: tuple[Span, ...] = ()

    @property
    def context(self) -> list[int]:
        """The chunks' tokens."""
        return [token for chunk in self.chunks for token in chunk]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where the chunks are."""
        ends = [sum(map(len, self.chunks[: at + 1])) for at in range(len(self.chunks))]
        return tuple(zip([0, *ends[:-1]], ends, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path, help="consent for `tiercel serve` (store.accept_lossy)")
    parser.add_argument("--lengths", action="store_true", help="only what chunks of few tokens earn")
    parser.add_argument("--prompts", type=int, default=4, help="per task")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = TransformersEngine(
        demo_model_dir(), device="cpu", block_tokens=BLOCK_TOKENS, load_always=True, chunks=ChunkReuse()
    )
    config = Config.load(None, {}, {"ram.size": "512MiB"})
    store = open_store(config, engine.layout.payload_bytes)
    try:
        engine.attach(store)
        results = by_length(engine, store) if arguments.lengths else measure(engine, store, arguments.prompts)
    finally:
        store.close()
    publish(results, arguments.json)
    if arguments.report:
        rows = [
            {"policy": f"{METHOD}-{name}", "budget": 1.0, "task": task, **figures}
            for task, variants in results["tasks"].items()
            for name, figures in variants.items()
            if name != UNMOVED
        ]
        identity = engine.identity
        told = {"model": identity.model, "revision": identity.revision, "rows": rows}
        arguments.report.write_text(json.dumps(told, indent=1) + "\n")


def measure(engine: TransformersEngine, store: TieredStore, prompts: int) -> dict[str, Any]:
    """All tasks, and times on the one with four chunks."""
    texts = Texts(find_texts(None))
    kinds: dict[str, Callable[[int], Asked]] = {
        "adjacent": lambda seed: adjacent(engine, texts, seed),
        "unrelated": lambda seed: unrelated(engine, texts, seed),
        "kv-list": lambda seed: halves_of_list(engine, texts, seed),
    }
    tasks = {}
    for name, make in kinds.items() if prompts else ():
        tasks[name] = judged(engine, store, [make(seed) for seed in range(1, prompts + 1)])
        print(name, json.dumps(tasks[name]), file=sys.stderr, flush=True)
    times = {
        name: timed(engine, store, make(1), VARIANTS) for name, make in kinds.items() if name != "kv-list"
    }
    return {"prompts": prompts, "texts": texts.sources, "tasks": tasks, "ttft": times}


def judged(engine: TransformersEngine, store: TieredStore, asked: Sequence[Asked]) -> dict[str, Any]:
    """Each variant's figures over some prompts."""
    assert engine.chunks is not None
    move = engine.chunks.rotate
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ["full", *VARIANTS]}
    for one in asked:
        reference = answers_in_full(engine, one)
        note(found["full"], reference, reference, one)
        for name, reuse in VARIANTS.items():
            engine.chunks.reuse = reuse
            engine.chunks.rotate = (lambda keys, by: keys) if name == UNMOVED else move
            note(found[name], reference, answers(engine, one), one)
        engine.chunks.rotate = move
        store.clear()
    return {name: shown(figures) for name, figures in found.items()}


def shown(figures: dict[str, list[float]]) -> dict[str, Any]:
    """Means over the prompts, of the KL also a 95 % interval."""
    low, high = interval(figures["kl"])
    means = {name: statistics.fmean(values) for name, values in figures.items()}
    return means | {"kl_low": low, "kl_high": high}


def note(into: dict[str, list[float]], right: Tensor, said: Tensor, asked: Asked) -> None:
    """Compare log probabilities [new, vocabulary] at the places that count."""
    at = [place - 1 for place in asked.scored]
    right, said = right[at], said[at]
    told = {
        "kl": float((right.exp() * (right - said)).sum(-1).mean()),
        "agreement": float((right.argmax(-1) == said.argmax(-1)).float().mean()),
    }
    if asked.answers:
        place_of = {place: at for at, place in enumerate(asked.scored)}
        best = said.argmax(-1).tolist()
        hits = [
            all(best[place_of[place]] == asked.new[place] for place in range(*span)) for span in asked.answers
        ]
        told["accuracy"] = statistics.fmean(hits)
    for name, value in told.items():
        into.setdefault(name, []).append(value)


@torch.inference_mode()
def answers(engine: TransformersEngine, asked: Asked) -> Tensor:
    """Log probabilities [new, vocabulary] behind reused chunks."""
    assert engine.chunks is not None
    cache = engine.take_cache(len(asked.context) + len(asked.new))
    request = Request(asked.context, chunks=asked.spans)
    engine.chunks.blend(request, asked.spans, cache, lambda: False, None)
    return forced(engine, asked, cache)


@torch.inference_mode()
def answers_in_full(engine: TransformersEngine, asked: Asked) -> Tensor:
    """The same behind a full prefill."""
    cache = engine.take_cache(len(asked.context) + len(asked.new))
    engine.run_blocks(asked.context, cache)
    return forced(engine, asked, cache)


def forced(engine: TransformersEngine, asked: Asked, cache: Any) -> Tensor:
    ids = torch.tensor([asked.new])
    logits: Tensor = engine.model.module(input_ids=ids, past_key_values=cache, use_cache=True).logits
    engine.give_back(cache)
    return logits[0].float().log_softmax(-1)


def timed(
    engine: TransformersEngine, store: TieredStore, asked: Asked, variants: Mapping[str, ChunkReuse]
) -> dict[str, Any]:
    """TTFT of a question behind the chunks: computed in full, and by variant with all of them in RAM."""
    assert engine.chunks is not None
    question = engine.encode(QUESTION)
    whole = Request([*asked.context, *question], max_new_tokens=1, use_cache=False)
    reusing = replace(whole, use_cache=True, chunks=asked.spans)

    def full() -> None:
        assert not list(engine.generate(whole))[-1].reused_tokens  # type: ignore[union-attr]

    def with_chunks(reuse: ChunkReuse) -> Callable[[], None]:
        def run() -> None:
            assert engine.chunks is not None
            engine.chunks.reuse = reuse
            result: Any = list(engine.generate(reusing))[-1]
            blocks = sum(-(-len(one) // BLOCK_TOKENS) for one in asked.chunks)
            assert result.sources.get("ram", 0) in (0, blocks), "all or, the first time, none"

        return run

    warm = with_chunks(variants["16"])

    def cold() -> None:
        store.clear()
        warm()

    calls = {"full": full, "16, none stored": cold}
    calls |= {name: with_chunks(reuse) for name, reuse in variants.items() if name != UNMOVED}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(TIMED_ROUNDS + 1):
        for name, call in calls.items():
            began_s = time.thread_time()
            call()
            taken[name] += [time.thread_time() - began_s] if number else []
    rows = {
        name: times_shown(times) | {"full_over_it": ratio(taken["full"], times)}
        for name, times in taken.items()
    }
    return {"prompt_tokens": len(whole.tokens), "rows": rows}


class OfAnyLength(ChunkReuse):
    """Reuse that finds every chunk worth a block."""

    __slots__ = ()

    def worth(self, span: Span, block_tokens: int) -> bool:
        """Yes."""
        return True


def by_length(engine: TransformersEngine, store: TieredStore) -> dict[str, Any]:
    """What chunks of a text of 1,024 tokens save and cost for each block that they take, by their length."""
    texts = Texts(find_texts(None))
    tokens = engine.encode(texts.piece(1, 3000))[:1024]
    rows = {}
    for length in LENGTHS:
        chunks = tuple(tuple(tokens[at : at + length]) for at in range(0, len(tokens) - length + 1, length))
        times = timed(engine, store, Asked(chunks, (), ()), {"16": OfAnyLength(16)})["rows"]
        full_s, cold_s, warm_s = (times[name]["median_s"] for name in ("full", "16, none stored", "16"))
        rows[str(length)] = {
            "blocks": len(chunks),
            "saved_s_per_block": (full_s - warm_s) / len(chunks),
            "first_time_s_per_block": (cold_s - full_s) / len(chunks),
            "times": times,
        }
        print(length, json.dumps(rows[str(length)]), file=sys.stderr, flush=True)
    return {"texts": texts.sources, "lengths": rows}


def adjacent(engine: TransformersEngine, texts: Texts, seed: int) -> Asked:
    """A text cut in two, and how it goes on."""
    tokens = engine.encode(texts.piece(seed, 3000))
    first, second, rest = tokens[:1000], tokens[1000:2000], tokens[2000 : 2000 + GOES_ON_TOKENS]
    return _going_on((first, second), rest)


def unrelated(engine: TransformersEngine, texts: Texts, seed: int) -> Asked:
    """Four pieces of texts, and how the last one goes on."""
    pieces = [engine.encode(texts.piece(4 * seed + at, 1200)) for at in range(4)]
    return _going_on([one[:500] for one in pieces], pieces[-1][500 : 500 + GOES_ON_TOKENS])


def _going_on(chunks: Sequence[Sequence[int]], rest: Sequence[int]) -> Asked:
    assert len(rest) == GOES_ON_TOKENS, len(rest)
    return Asked(tuple(map(tuple, chunks)), tuple(rest), tuple(range(1, len(rest))))


def halves_of_list(engine: TransformersEngine, texts: Texts, seed: int) -> Asked:
    """A list of codes, cut in two at a line, and questions."""
    sample = kv_list(seed, texts.piece)
    middle = sample.context.index("\n", len(sample.context) // 2) + 1
    halves = (sample.context[:middle], sample.context[middle:])
    new: list[int] = []
    spans = []
    for turn in sample.turns:
        new += engine.encode(turn.question)
        answer = engine.encode(turn.answer)
        spans.append((len(new), len(new) + len(answer)))
        new += answer
    scored = tuple(place for span in spans for place in range(*span))
    return Asked(tuple(tuple(engine.encode(half)) for half in halves), tuple(new), scored, tuple(spans))


if __name__ == "__main__":
    main()
