"""A vLLM in a process of its own, asked over its pipes: one JSON question per line, one JSON answer.

`Engine` is the asking end. vLLM's warnings, threads and leftovers stay in a process that ends with its pipe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRON = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore",
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What a request got: tokens, their log-probabilities, prompt tokens that were not computed."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


class Engine:
    """A vLLM of one model; `settings` are those of `vllm.LLM`, `extra` the connector's options, if any."""

    def __init__(
        self,
        model: Path,
        extra: dict[str, Any] | None,
        environ: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        asked = {"model": str(model), "extra": extra, "settings": settings}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.vllm.driver", json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRON, **(environ or {})},
            cwd=Path(__file__).parents[3],
        )
        self._answer()

    def ask(self, prompts: Sequence[list[int]], generate: int = 12, **options: Any) -> list[Answer]:
        """Answers to all prompts, asked at once. `salts` and `lora` (name, number, path) as vLLM has them."""
        made = self.call("ask", prompts=prompts, generate=generate, options=options)
        return [Answer(tuple(tokens), tuple(logprobs), cached) for tokens, logprobs, cached in made]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, once nothing is being saved any more."""
        self.call("forget")

    def figure(self, name: str) -> float:
        """One of our counters, as vLLM exports it."""
        return float(self.call("figure", name=name))

    def call(self, what: str, **given: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, **given}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it as its user would."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(f"vLLM ended with {self.process.wait(60)}")


def reply(value: Any) -> None:
    print("answer " + json.dumps(value), flush=True)


class Driver:
    """The answering end."""

    def __init__(self, model: str, extra: dict[str, Any] | None, settings: dict[str, Any]) -> None:
        from vllm import LLM

        if extra is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "TiercelConnector", "kv_connector_module_path": "tiercel.engines.vllm",
                "kv_role": "kv_both", "kv_connector_extra_config": extra,
            }  # fmt: skip
        defaults = {
            "dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "enable_prefix_caching": True,
            "disable_log_stats": False, "max_num_batched_tokens": 512,
        }  # fmt: skip
        self.llm = LLM(model, **{**defaults, **settings})

    def ask(self, prompts: list[list[int]], generate: int, options: dict[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest

        salts = options.pop("salts", None) or [None] * len(prompts)
        lora = options.pop("lora", None)
        asked = [
            TokensPrompt(prompt_token_ids=one, **({} if salt is None else {"cache_salt": salt}))
            for one, salt in zip(prompts, salts, strict=True)
        ]
        sampling = SamplingParams(max_tokens=generate, temperature=0, logprobs=1, ignore_eos=True, **options)
        request = LoRARequest(*lora) if lora else None
        answers = []
        for output in self.llm.generate(asked, sampling, use_tqdm=False, lora_request=request):
            (made,) = output.outputs
            steps = zip(made.token_ids, made.logprobs, strict=True)
            chances = [step[token].logprob for token, step in steps]
            answers.append([list(made.token_ids), chances, output.num_cached_tokens])
        return answers

    def forget(self) -> bool:
        until_s = time.monotonic() + 30
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > until_s:
                raise TimeoutError("blocks are still held")
            time.sleep(0.05)
        return True

    def figure(self, name: str) -> float:
        found = [one for one in self.llm.get_metrics() if one.name == f"vllm:tiercel_{name}"]
        return float(sum(one.value for one in found))


def main() -> None:
    asked = json.loads(sys.argv[1])
    driver = Driver(asked["model"], asked["extra"], asked["settings"])
    reply(True)
    for line in sys.stdin:
        question = json.loads(line)
        reply(getattr(driver, question.pop("what"))(**question))


if __name__ == "__main__":
    main()
