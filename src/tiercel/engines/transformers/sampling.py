"""From logits to the next token: greedy, or sampled with a temperature and a nucleus.

Equal logits and equal seeds give equal tokens, so an answer does not depend on what came from the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from tiercel.engines.transformers.request import Request

# Dividing by less would leave the range of float32; the likeliest token is all that is left there anyway.
_GREEDY_BELOW = 1e-6


class Sampler:
    """Picks the tokens of one answer."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self._greedy = request.temperature < _GREEDY_BELOW
        self._processors: Any = LogitsProcessorList()
        if self._greedy:
            return
        if request.temperature != 1.0:
            self._processors.append(TemperatureLogitsWarper(request.temperature))
        if request.top_p < 1.0:
            self._processors.append(TopPLogitsWarper(top_p=request.top_p))
        self._random = torch.Generator(device=device)
        if request.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(request.seed)

    @torch.inference_mode()
    def pick(self, logits: torch.Tensor) -> int:
        """The next token for `logits` of shape [vocabulary]. Waits for the device."""
        scores = logits.to(torch.float32).unsqueeze(0)
        if self._greedy:
            return int(scores.argmax(dim=-1).item())
        scores = self._processors(torch.empty((1, 0), dtype=torch.long, device=scores.device), scores)
        odds = torch.softmax(scores, dim=-1)
        return int(torch.multinomial(odds, num_samples=1, generator=self._random).item())
