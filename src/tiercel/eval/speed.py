"""How a policy generates: a short answer token by token, with its KV where a server would keep it.

The prompt is read anew for each policy, with what the policy must see of it. What runs is the judge's own
attention in float32, so seconds compare policies with each other and with `full`; bytes are what is counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from tiercel.eval.judge import Encoded, context_of

if TYPE_CHECKING:
    from tiercel.attention.running import Setting, TeacherForced

_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Speed:
    """One policy's short answer.

    ttft_s        reading the prompt with full attention, and deciding what to keep
    tpot_s        median of the steps, one token each
    device_bytes  most KV on the device at a time while it answers, counted, new tokens included
    moved_bytes   from host memory to the device, per token of the answer
    """

    ttft_s: float
    tpot_s: float
    device_bytes: int
    moved_bytes: float


def speed_of(forced: TeacherForced, tokenizer: Any, encoded: Encoded, setting: Setting) -> Speed:
    """Generate greedily behind a sample's context under `setting`."""
    from tiercel.attention.device import DeviceMemory
    from tiercel.attention.generating import Generation

    ids, special, punctuation = context_of(encoded, tokenizer, forced.device)
    begun = time.perf_counter()
    prompt = forced.prefill(ids, [setting], special=special, punctuation=punctuation)
    token = int(prompt.logits[0].argmax())
    memory = DeviceMemory(ids.device)
    generation = Generation(forced, prompt, 0, memory)
    ttft_s = time.perf_counter() - begun
    steps = []
    for _ in range(_TOKENS):
        begun = time.perf_counter()
        token = int(generation.step(token).argmax())
        steps.append(time.perf_counter() - begun)
    served = generation.served
    return Speed(ttft_s, median(steps), memory.peak_bytes, served.moved_bytes / served.steps)
