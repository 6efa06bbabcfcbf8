"""One vLLM engine as a process: reads a JSON command a line, answers each with a JSON line. Knows of no arm.

Runs in any environment that has vLLM, so it imports nothing of ours. Whatever else writes to standard output
ends up in the log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

RESET_DEADLINE_S = 30.0


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        self.llm = LLM(**options)
        self.asked = 0

    def ttft(self, tokens: list[int], hints: dict[str, Any] | None = None) -> dict[str, Any]:
        """Seconds from the call to the first token of one greedy answer, alone in the engine."""
        extra = {"kv_transfer_params": {"tiercel": hints}} if hints else None
        started = time.perf_counter()
        (answer,) = self.llm.generate(
            [TokensPrompt(prompt_token_ids=tokens)],
            SamplingParams(temperature=0, max_tokens=1, extra_args=extra),
            use_tqdm=False,
        )
        taken = time.perf_counter() - started
        return {
            "seconds": taken,
            "token": answer.outputs[0].token_ids[0],
            "reused": answer.num_cached_tokens or 0,
        }

    def answer(self, tokens: list[int], max_tokens: int) -> dict[str, Any]:
        """A greedy answer, alone in the engine."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        (answer,) = self.llm.generate([TokensPrompt(prompt_token_ids=tokens)], params, use_tqdm=False)
        return {"tokens": list(answer.outputs[0].token_ids)}

    def together(
        self, prompts: list[list[int]], max_tokens: int, hints: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """All prompts at once: when each had its first token, when the last was finished."""
        extra = {"kv_transfer_params": {"tiercel": hints}} if hints else None
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        first: dict[str, float] = {}
        tokens: dict[str, int] = {}
        reused: dict[str, int] = {}
        started = time.perf_counter()
        for prompt in prompts:
            self.asked += 1
            self.llm.llm_engine.add_request(
                f"r{self.asked:06}", TokensPrompt(prompt_token_ids=prompt), params
            )
        while self.llm.llm_engine.has_unfinished_requests():
            for answer in self.llm.llm_engine.step():
                if answer.request_id not in first:
                    first[answer.request_id] = time.perf_counter() - started
                    tokens[answer.request_id] = answer.outputs[0].token_ids[0]
                    reused[answer.request_id] = answer.num_cached_tokens or 0
        taken = time.perf_counter() - started
        order = sorted(first)
        return {
            "seconds": taken,
            "first_s": [first[name] for name in order],
            "tokens": [tokens[name] for name in order],
            "reused": [reused[name] for name in order],
        }

    def reset(self) -> dict[str, Any]:
        """Empty vLLM's own prefix cache; it refuses while blocks are still being saved, so ask again."""
        until = time.perf_counter() + RESET_DEADLINE_S
        while not self.llm.reset_prefix_cache():
            assert time.perf_counter() < until, "vLLM's prefix cache could not be reset"
            time.sleep(0.02)
        return {}


def commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def reply(out: TextIO, what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.perf_counter()
    engine = Engine(json.loads(sys.argv[1]))
    reply(out, {"ready_s": time.perf_counter() - started})
    for command in commands():
        name = command.pop("do")
        reply(out, getattr(engine, name)(**command))


if __name__ == "__main__":
    main()
