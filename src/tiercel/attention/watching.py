"""Lets a policy's observers watch a prefill that somebody else computes, layer by layer, in order.

The weights they see are computed here a second time: the prefill's own arithmetic stays what it is, bit for
bit, because its KV is stored for others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.attention.call import Call
from tiercel.attention.numbers import as_bias, attention_weights, causal
from tiercel.attention.policy import (
    LayerContext,
    Observer,
    Policy,
    Prefill,
    Prepared,
    RotateKeys,
    budget_tokens,
)


class Watching:
    """One prompt of `tokens` tokens under `policy` with `share` of them.

    `special` and `punctuation` [1, tokens] as in LayerContext. `windows` holds the layers that were seen with
    a sliding window of their own.
    """

    def __init__(
        self, policy: Policy, share: float, real: Tensor, special: Tensor | None = None,
        punctuation: Tensor | None = None, rotate: RotateKeys | None = None,
    ) -> None:  # fmt: skip
        self._policy, self._share, self._real = policy, share, real
        self._special, self._punctuation, self._rotate = special, punctuation, rotate
        self._first = real.shape[1] - policy.watches(real.shape[1])
        self._observers: dict[int, Observer | None] = {}
        self.windows: dict[int, int] = {}

    @torch.inference_mode()
    def see(self, call: Call) -> None:
        """A step of the prefill, with all keys so far; steps that no observer needs may be missing."""
        if call.window is not None:
            self.windows[call.layer] = call.window
            return
        observer = self._observer(call.layer, call.keys.shape[1])
        if observer is None or call.keys.shape[2] <= self._first:
            return
        for first, queries in call.parts():
            begin = call.before + first
            end = begin + queries.shape[3]
            bias = as_bias(causal(begin, end - begin, end, None, call.keys.device))[None, None, None]
            observer.see(
                attention_weights(queries, call.keys[:, :, :end], bias, call.scale, call.softcap), begin
            )

    def prepare(self, layer: int, keys: Tensor, values: Tensor) -> Prepared:
        """The decision for a layer without a window, with keys and values [1, kv_heads, tokens, dim]."""
        kv_heads = keys.shape[1]
        context = LayerContext(
            layer, keys, values, self._real, self._special, self._punctuation, self._rotate
        )
        return self._policy.prepare(context, self._budget(kv_heads), self._observer(layer, kv_heads))

    def _observer(self, layer: int, kv_heads: int) -> Observer | None:
        if layer not in self._observers:
            prefill = Prefill(self._real, kv_heads, self._budget(kv_heads))
            self._observers[layer] = self._policy.observer(prefill)
        return self._observers[layer]

    def _budget(self, kv_heads: int) -> Tensor:
        return budget_tokens(self._share, self._real, kv_heads)
