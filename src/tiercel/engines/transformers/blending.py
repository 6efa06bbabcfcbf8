"""Computing some of a prompt's tokens, wherever they stand, over KV that is already there for the others.

    there      pppp ....cccccccccccc....cccccccccccc          prefix, chunks moved to their place
    computed        hhhh            hhhh            qqqq      each looks at all that stands before it

One forward of the model with explicit positions, an explicit causal mask and a cache that puts new keys and
values where they belong among the others: no model's layers are written out here. Which tokens deviate most
is told by CacheBlend's rule (Yao et al., arXiv 2405.16444, section 4.3): all are computed up to an early
layer, where values are compared with what is there; the forward ends in that layer. It never stores anything
and knows no chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer

from tiercel.attention.layer import CountedLayer
from tiercel.attention.policy import RotateKeys
from tiercel.attention.rotation import key_rotation
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.engines.transformers.layout import BlockLayout
from tiercel.engines.transformers.model import LoadedModel
from tiercel.errors import ModelError

# Where deviations are looked at: the first layer whose values depend on what other chunks say. Values tell
# slightly more than keys.
_CHECK_LAYER = 1
_TRIAL_TOKENS, _TRIAL_KNOWN, _TRIAL_LOST = 24, 16, range(4, 12)
# bf16 rounds differently when a sequence is split differently; a wrong mask or place is far beyond that.
_TRIAL_ERROR_MAX = 0.05


class _Enough(Exception):
    """The forward has come to the layer that was to be seen; `moved` [new] is how far values are off."""

    def __init__(self, moved: Tensor) -> None:
        super().__init__()
        self.moved = moved


class _ScatteredLayer(CountedLayer):  # type: ignore[no-untyped-call]  # transformers has no types
    """One layer's buffers, in which new keys and values go to given places; `length` are all others there."""

    def __init__(self, buffers: tuple[Tensor, Tensor], places: Tensor, stop: int) -> None:
        super().__init__(stop - len(places))
        self._keys, self._values = buffers
        self._places, self._stop = places, stop

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put [1, kv_heads, new, dim] to their places; returns views of all up to the last of these."""
        self._keys.index_copy_(2, self._places, key_states)
        self._values.index_copy_(2, self._places, value_states)
        return self._keys[:, :, : self._stop], self._values[:, :, : self._stop]


class _CheckedLayer(_ScatteredLayer):  # type: ignore[no-untyped-call]  # transformers has no types
    """The layer at which a forward ends: it tells how far new values are from those that were there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put them to their places too, for they are exact; raises _Enough."""
        moved = value_states.float() - self._values.index_select(2, self._places).float()
        super().update(key_states, value_states)
        raise _Enough(moved.square().sum((1, 3))[0])


def compute_at(model: LoadedModel, cache: KVCache, tokens: Sequence[int], places: Sequence[int]) -> Tensor:
    """Compute the KV of the prompt `tokens` at `places` (ascending); returns the last one's logits.

    `cache` has room for the prompt, and KV wherever one of them looks that is not computed here.
    """
    return _forward(model, cache, tokens, places, _ScatteredLayer)


def deviations(model: LoadedModel, cache: KVCache, tokens: Sequence[int], places: Sequence[int]) -> Tensor:
    """How far each token's values are off in an early layer, [places]: squared differences, summed.

    Up to that layer the exact KV takes the place of what was there.
    """
    try:
        _forward(model, cache, tokens, places, _CheckedLayer)
    except _Enough as seen:
        return seen.moved
    raise AssertionError("the forward did not come to the layer that was to be seen")


@torch.inference_mode()
def _forward(
    model: LoadedModel,
    cache: KVCache,
    tokens: Sequence[int],
    places: Sequence[int],
    at_check: type[_ScatteredLayer],
) -> Tensor:
    stop, device = places[-1] + 1, model.device
    assert stop <= cache.capacity, (stop, cache.capacity)
    at = torch.tensor(places, device=device)
    check = min(_CHECK_LAYER, len(model.shapes) - 1)
    layers = [
        (at_check if index == check else _ScatteredLayer)(cache.buffers(index), at, stop)
        for index in range(len(model.shapes))
    ]
    # Additive: every implementation of attention understands it, and none builds its own in its place.
    unseen = torch.arange(stop, device=device) > at[:, None]
    mask = torch.zeros(unseen.shape, dtype=model.dtype, device=device).masked_fill_(unseen, -torch.inf)
    output = model.module(
        input_ids=torch.tensor([[tokens[place] for place in places]], device=device),
        position_ids=at[None],
        attention_mask=mask[None, None],
        past_key_values=Cache(layers=list(layers)),
        use_cache=True,
        **({"logits_to_keep": 1} if model.keeps_last_logits else {}),
    )
    logits: Tensor = output.logits[0, -1]
    return logits


def rotation_of(model: LoadedModel, layout: BlockLayout) -> RotateKeys:
    """How keys of `model` are moved, its chunks then being computed upon: both tried on it.

    Raises ModelError, one line, for a model whose KV cannot be moved.
    """
    if any(
        type(layer) is DynamicSlidingWindowLayer for layer in DynamicCache(config=model.module.config).layers
    ):
        raise ModelError(
            f"chunks of model '{model.name}' cannot be reused: it has layers with a sliding window; accepted "
            "are models whose layers all see the whole prompt"
        )
    rotate = key_rotation(model.module)
    if rotate is None:
        raise ModelError(
            f"chunks of model '{model.name}' cannot be reused: its keys cannot be moved to other positions; "
            "accepted are rotary position encodings that are alike in all layers and at every length"
        )
    if not _blends(model, layout):
        raise ModelError(
            f"chunks of model '{model.name}' cannot be reused: with an explicit mask its attention says "
            "other than without one"
        )
    return rotate


@torch.inference_mode()
def _blends(model: LoadedModel, layout: BlockLayout) -> bool:
    """Whether tokens computed at their places say the same as in a plain forward."""
    ids = [(5 + 3 * at) % model.vocab_tokens for at in range(_TRIAL_TOKENS)]
    plain, blended = KVCache(layout, model.device), KVCache(layout, model.device)
    for cache in (plain, blended):
        cache.reserve(_TRIAL_TOKENS)
    right: Tensor = model.module(
        input_ids=torch.tensor([ids], device=model.device), past_key_values=plain, use_cache=True
    ).logits[0, -1]
    model.module(
        input_ids=torch.tensor([ids[:_TRIAL_KNOWN]], device=model.device),
        past_key_values=blended,
        use_cache=True,
    )
    for index in range(len(model.shapes)):
        for buffer in blended.buffers(index):
            buffer[:, :, list(_TRIAL_LOST)] = 0
    said = compute_at(model, blended, ids, [*_TRIAL_LOST, *range(_TRIAL_KNOWN, _TRIAL_TOKENS)])
    error = (said.float() - right.float()).norm() / right.float().norm().clamp(min=1e-9)
    return bool(error <= _TRIAL_ERROR_MAX)
