"""Codecs on real KV: how much smaller, how fast on one core, how far off, and what that does to answers.

python -m benchmarks.codecs [--json FILE] [--quick] [--candidates]

KV of SmolLM2-135M (bf16) over this repository's own pages. Seconds are processor time of one thread, best of
three per block. KL is in nats per token of answers, teacher-forced behind a context whose full blocks went
through the codec, against the same context with its blocks as they were computed: over a list of 110 codes of
which 12 are asked, and over text. The table of docs/codecs.md is printed behind the figures. `--candidates`
adds what was tried and left out: for the lossless codec (it needs numcodecs), and as groups of int8's keys.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.codec_groups import groupings
from benchmarks.timing import publish
from tiercel.blocks import record_bytes
from tiercel.codecs import LOSSY, BlockShape, Codec, codec_named
from tiercel.engines.transformers import TransformersEngine
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.models import demo_model_dir

BLOCK_TOKENS = 256
REPEATS = 3
ROOT = Path(__file__).parents[1]
Change = Callable[[memoryview], memoryview]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer blocks and questions")
    parser.add_argument("--candidates", action="store_true", help="what was tried and left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(TransformersEngine(demo_model_dir(), device="cpu", block_tokens=BLOCK_TOKENS))
    codecs = [codec_named("lossless"), *LOSSY.values()]
    blocks = bench.blocks(2 if arguments.quick else 6)
    rows = {one.name: bench.cost(one, blocks) for one in codecs}
    for name, figures in bench.quality(list(LOSSY.values()), 1 if arguments.quick else 3).items():
        rows[name] |= figures
    results: dict[str, Any] = {"block_bytes": len(blocks[0]), "codecs": rows}
    if arguments.candidates:
        results["candidates"] = candidates(blocks)
        results["keys_in_8_bits"] = groupings(blocks, bench.shape.sizes)
    publish(results, arguments.json)
    print(table(rows))


KEEPS = {
    "lossless": "every bit; sign and exponent bytes entropy-coded (zstd)",
    "int8": "8 bits; keys by channel, groups of 128 tokens, values by token",
    "fp8": "float8 e4m3, a scale per token and head",
    "int4": "4 bits; keys by channel, values by token, groups of 32",
}


def table(rows: dict[str, dict[str, float]]) -> str:
    """The rows of the table in docs/codecs.md."""
    lines = ["", "| `none` | the bytes | 1 | | | 0 | 0 | 0 |"]
    for name, row in rows.items():
        cost = f"{row['ratio']:.2f} | {row['encode_GBps']:.1f} GB/s | {row['decode_GBps']:.1f} GB/s"
        lost = "0 | 0 | 0"
        if row["relative_error"]:
            lost = f"{row['relative_error']:.1%} | {row['list_kl']:.4f} | {row['text_kl']:.4f}".replace(
                "%", " %"
            )
        lines.append(f"| `{name}` | {KEEPS[name]} | {cost} | {lost} |")
    return "\n".join(lines)


class Bench:
    """The model, and what its blocks are like to a codec."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        shape = engine.layout.shape()
        assert shape is not None
        self.shape: BlockShape = shape
        pages = (
            "README.md",
            *(f"docs/{name}.md" for name in ("architecture", "policies", "sizing", "tiers")),
        )
        self.text = engine.encode("\n".join((ROOT / page).read_text() for page in pages))

    def blocks(self, count: int) -> list[memoryview]:
        """The first blocks of the text, as they are stored."""
        cache = KVCache(self.engine.layout, self.engine.model.device)
        with torch.inference_mode():
            self.engine.run_blocks(self.text[: count * BLOCK_TOKENS], cache)
        return list(self._saved(cache, count))

    def cost(self, codec: Codec, blocks: Sequence[memoryview]) -> dict[str, float]:
        """Ratio and speed over some blocks, and the mean relative error of a block."""
        into, back = memoryview(bytearray(len(blocks[0]))), memoryview(bytearray(len(blocks[0])))
        at_rest, encode_s, decode_s, errors = 0, 0.0, 0.0, []
        for block in blocks:
            size = codec.encode(block, into, self.shape)
            assert size is not None
            assert codec.decode(into[:size], back, self.shape)
            at_rest += record_bytes(size)
            encode_s += best(lambda block=block: codec.encode(block, into, self.shape))
            decode_s += best(lambda size=size: codec.decode(into[:size], back, self.shape))
            errors.append(off(block, back))
        total = len(blocks) * len(blocks[0])
        return {
            "ratio": len(blocks) * record_bytes(len(blocks[0])) / at_rest,
            "encode_GBps": total / encode_s / 1e9,
            "decode_GBps": total / decode_s / 1e9,
            "relative_error": statistics.mean(errors),
        }

    def quality(self, codecs: Sequence[Codec], seeds: int) -> dict[str, dict[str, float]]:
        """KL and top-1 agreement of each codec on both tasks."""
        found: dict[str, dict[str, list[float]]] = {one.name: {} for one in codecs}
        for task, context, answer in self._asked(seeds):
            exact = self._answers(context, answer, None)
            for codec in codecs:
                near = self._answers(context, answer, self._through(codec))
                divergence = (exact.exp() * (exact - near)).sum(-1).mean().item()
                agreement = (exact.argmax(-1) == near.argmax(-1)).float().mean().item()
                for name, value in ((f"{task}_kl", divergence), (f"{task}_agreement", agreement)):
                    found[codec.name].setdefault(name, []).append(value)
        return {
            one: {name: statistics.mean(all_) for name, all_ in told.items()} for one, told in found.items()
        }

    def _asked(self, seeds: int) -> Iterator[tuple[str, list[int], list[int]]]:
        for seed in range(seeds):
            context, answer = list_of_codes(seed)
            yield "list", self.engine.encode(context), self.engine.encode(answer)
            start = 2000 + 2500 * seed
            yield "text", self.text[start : start + 1536], self.text[start + 1536 : start + 1736]

    def _through(self, codec: Codec) -> Change:
        def change(block: memoryview) -> memoryview:
            into, back = memoryview(bytearray(len(block))), memoryview(bytearray(len(block)))
            size = codec.encode(block, into, self.shape)
            assert size is not None
            assert codec.decode(into[:size], back, self.shape)
            return back

        return change

    @torch.inference_mode()
    def _answers(self, context: Sequence[int], answer: Sequence[int], change: Change | None) -> torch.Tensor:
        """Log probabilities [answer tokens, vocabulary] behind a context whose full blocks were changed."""
        cache = KVCache(self.engine.layout, self.engine.model.device)
        count = len(context) // BLOCK_TOKENS
        self.engine.run_blocks(context[: count * BLOCK_TOKENS], cache)
        if change is not None:
            changed = [change(block) for block in self._saved(cache, count)]
            cache.truncate(0)
            for index, block in enumerate(changed):
                cache.restore_block(index, block)
        ids = torch.tensor([[*context[count * BLOCK_TOKENS :], *answer]])
        logits = self.engine.model.module(input_ids=ids, past_key_values=cache, use_cache=True).logits
        told: torch.Tensor = logits[0, -len(answer) - 1 : -1].float().log_softmax(-1)
        return told

    def _saved(self, cache: KVCache, count: int) -> Iterator[memoryview]:
        for index in range(count):
            block = memoryview(bytearray(self.engine.layout.payload_bytes))
            cache.save_block(index, block)
            yield block


def list_of_codes(seed: int) -> tuple[str, str]:
    """A list of names and numbers, and some of them again."""
    chance = random.Random(seed)
    first, last = (
        "Al Be Ca Do El Fa Gi Ha Jo Ka La".split(),
        "ron mian lena ris tor nel dra vin sta mo".split(),
    )
    names = [a + b for a in first for b in last]
    chance.shuffle(names)
    codes = {name: f"{chance.randrange(100_000):05d}" for name in names}
    lines = "".join(f"{name}: {code}\n" for name, code in codes.items())
    asked = "".join(f"The code of {name} is {codes[name]}.\n" for name in chance.sample(names, 12))
    return f"Codes:\n{lines}", f"\nQuestions.\n{asked}"


def best(call: Callable[[], object]) -> float:
    """Processor seconds of this thread for one call: others on the machine do not count."""
    times = []
    for _ in range(REPEATS):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return min(times)


def off(block: memoryview, back: memoryview) -> float:
    """Norm of what changed over the norm of what was there (bfloat16)."""
    was, now = (
        (np.frombuffer(one, np.uint16).astype(np.uint32) << 16).view(np.float32) for one in (block, back)
    )
    return float(np.linalg.norm(now - was) / np.linalg.norm(was))


def candidates(blocks: Sequence[memoryview]) -> dict[str, dict[str, float]]:
    """A library with a shuffle of its own, with the compressors it has, at their fastest useful levels."""
    from numcodecs import blosc

    blosc.set_nthreads(1)
    tried = (("lz4", 1, 1), ("lz4", 1, 2), ("zstd", 1, 1), ("zstd", 3, 1), ("zstd", 1, 2))
    return {
        f"{name}-{level}, {'byte' if shuffle == 1 else 'bit'} shuffle": candidate(
            blocks,
            partial(blosc.compress, cname=name.encode(), clevel=level, shuffle=shuffle, typesize=2),
            blosc.decompress,
        )
        for name, level, shuffle in tried
    }


def candidate(
    blocks: Sequence[memoryview], compress: Callable[..., bytes], decompress: Callable[[bytes], bytes]
) -> dict[str, float]:
    """Ratio and speed of a pair of functions."""
    plain = [bytes(one) for one in blocks]
    packed = [compress(one) for one in plain]
    total = sum(map(len, plain))
    return {
        "ratio": total / sum(map(len, packed)),
        "encode_GBps": total / sum(best(partial(compress, one)) for one in plain) / 1e9,
        "decode_GBps": total / sum(best(partial(decompress, one)) for one in packed) / 1e9,
    }


if __name__ == "__main__":
    main()
