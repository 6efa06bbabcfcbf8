"""An answer token by token, with its KV where serving keeps it: what `tiercel eval` measures the speed of.

    generation = Generation(forced, prompt, number, memory)
    logits = generation.step(token)

It begins where `TeacherForced.prefill` ends and gives what `TeacherForced.answer` gives for the same tokens,
within rounding. The cache that the model sees counts tokens and keeps nothing: attention does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tiercel.attention.device import DeviceMemory
from tiercel.attention.layer import CountedLayer
from tiercel.attention.running import Prompt, TeacherForced, attending
from tiercel.attention.serving import Served


class CountingLayer(CountedLayer):  # type: ignore[no-untyped-call]  # transformers has no types
    """A layer of a cache whose keys and values are kept by whoever attends: it passes new ones on."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count them and hand them on."""
        self.length += key_states.shape[-2]
        return key_states, value_states


class Generation:
    """One answer to a prompt (one row, no padding) under setting `number` of its prefill.

    What it keeps on the device is counted in `memory`. Raises RequestError where it does not fit.
    """

    def __init__(self, forced: TeacherForced, prompt: Prompt, number: int, memory: DeviceMemory) -> None:
        if not bool(prompt.real.all()) or prompt.real.shape[0] != 1:
            raise ValueError("one row without padding is generated at a time")
        self._module = forced.module
        self.served = Served(memory)
        for layer in prompt.layers:
            if (window := prompt.windows.get(layer.layer)) is not None:
                self.served.keep_window(layer.layer, layer.keys, layer.values, window)
            else:
                self.served.take(layer.layer, prompt.prepared[number][layer.layer])
        self._place = prompt.tokens
        self._cache = Cache(layers=[CountingLayer(prompt.tokens) for _ in prompt.layers])

    @torch.inference_mode()
    def step(self, token: int) -> Tensor:
        """Run one more token; logits of the next, [vocabulary]."""
        ids = torch.tensor([[token]], device=self.served.lot.device)
        place = torch.tensor([[self._place]], device=ids.device)
        with attending(self.served):
            logits: Tensor = self._module(
                input_ids=ids, position_ids=place, past_key_values=self._cache, use_cache=True
            ).logits
        self._place += 1
        return logits[0, -1]
