"""The next tokens of several sequences in one step: a row each, linear layers together, attention by rows.

A row attends to its own cache, by the function that would do it alone: nothing is padded, and no row has to
do with another one's length. Products of several rows may round otherwise than of one, in the last bits of
the dtype. It runs no prompts, and knows neither requests nor stores.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tiercel.attention.layer import CountedLayer
from tiercel.engines.transformers.answering import Step
from tiercel.engines.transformers.kv_cache import KVCache, MakeCache
from tiercel.engines.transformers.layout import BlockLayout
from tiercel.engines.transformers.model import LoadedModel, sliding_windows
from tiercel.errors import ModelError

# What a model's keys carry from the cache to its attention: the layer whose they are.
MARK = "_tiercel_rows"
# Two sequences of different length, tried alone and together when an engine is made.
_PROBE_LENGTHS, _PROBE_STEPS = (5, 9), 2
# A step of one row is computed as without rows, whatever the dtype: a wrong place or mask is beyond this.
_ONE_ROW_ERROR_MAX = 0.02
# Products of several rows round otherwise: the demo model's logits differ by 0.06 in bf16, by less than 1e-5
# in float32, and by 0.5 and more where rows are mixed up.
_ROWS_ERROR_MAX, _ROWS_ERROR_MAX_FLOAT32 = 0.2, 0.01
# Of one sequence each, and of no use to an attention that is called for one token of one row.
_OF_THE_BATCH = ("position_ids", "cache_position")

Attention = Callable[..., tuple[Tensor, Any]]
# How the caches of some sequences become the one of their step, layer by layer.
MakeRows = Callable[[Sequence[KVCache]], Cache]


class RowsLayer(CountedLayer):  # type: ignore[no-untyped-call]  # transformers has no types
    """One layer of several sequences, each of which keeps its own. `window`: how far it sees (None: all).

    Its own length is none: a row's position says where it stands, and masks are none of the model's business.
    """

    def __init__(self, layers: Sequence[Any], window: int | None) -> None:
        super().__init__()
        self._layers, self.window = layers, window
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give each sequence its row of [rows, kv_heads, 1, dim]; returns them as they are, marked."""
        self._pairs = [
            layer.update(key_states[row : row + 1], value_states[row : row + 1])
            for row, layer in enumerate(self._layers)
        ]
        setattr(key_states, MARK, self)
        return key_states, value_states

    def attend(self, attention: Attention, module: torch.nn.Module, query: Tensor, **how: Any) -> Tensor:
        """Attend [rows, heads, 1, dim], each row to what its own layer gave back; [rows, 1, heads, dim].

        Raises ModelError where the model's window is not what its caches and masks go by.
        """
        if how.get("sliding_window") != self.window:
            raise ModelError(f"it sees {how.get('sliding_window')} tokens back where {self.window} are due")
        outputs = []
        for row, (keys, values) in enumerate(self._pairs):
            # What is shorter is passed on as it is: caches may have marked it.
            if self.window is not None and keys.shape[2] > self.window:
                keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
            outputs.append(attention(module, query[row : row + 1], keys, values, None, **how)[0])
        return torch.cat(outputs)


class Together:
    """Runs steps of several sequences of `model`, whose attention is made ready for it, for good.

    Raises ModelError, one line, for a model that says something else together than alone.
    """

    def __init__(
        self,
        model: LoadedModel,
        layout: BlockLayout,
        make_cache: MakeCache = KVCache,
        make_rows: MakeRows | None = None,
    ) -> None:
        self._model, self._windows = model, sliding_windows(model.module)
        self._make_rows = self._plain_rows if make_rows is None else make_rows
        try:
            self._use_our_attention()
            self._probe([[make_cache(layout, model.device) for _ in _PROBE_LENGTHS] for _ in range(3)])
        except ModelError as error:
            raise ModelError(
                f"answers of {model.name} cannot be decoded together: {error}; accepted: batch = 1"
            ) from None

    @torch.inference_mode()
    def run(self, steps: Sequence[Step]) -> list[Tensor]:
        """Run a token of each; the logits of each, [vocabulary]."""
        model, caches = self._model, [step.cache for step in steps]
        output = model.module(
            input_ids=torch.tensor([[step.token] for step in steps], device=model.device),
            position_ids=torch.tensor([[_place(cache)] for cache in caches], device=model.device),
            past_key_values=self._make_rows(caches),
            use_cache=True,
            **({"logits_to_keep": 1} if model.keeps_last_logits else {}),
        )
        return list(output.logits[:, -1])

    def _plain_rows(self, caches: Sequence[KVCache]) -> Cache:
        return Cache(
            layers=[
                RowsLayer([cache.layers[index] for cache in caches], window)
                for index, window in enumerate(self._windows)
            ]
        )

    def _use_our_attention(self) -> None:
        module = self._model.module
        if "position_ids" not in inspect.signature(module.forward).parameters:
            raise ModelError("it cannot be told where each of them stands")
        name = _registered(str(module.config._attn_implementation))
        module.set_attn_implementation(name)
        if module.config._attn_implementation != name:
            raise ModelError("its attention cannot be replaced")

    @torch.inference_mode()
    def _probe(self, caches: Sequence[Sequence[KVCache]]) -> None:
        """See that each of two sequences says the same by itself, beside the other, and as the only row."""
        float32 = self._model.dtype == torch.float32
        rows_error_max = _ROWS_ERROR_MAX_FLOAT32 if float32 else _ROWS_ERROR_MAX
        for some in caches:
            for cache, length in zip(some, _PROBE_LENGTHS, strict=True):
                self._alone([3 * at + length for at in range(length)], cache)
        for at in range(_PROBE_STEPS):
            plain, single, several = (
                [Step(7 + at + row, cache) for row, cache in enumerate(some)] for some in caches
            )
            right = [self._alone([step.token], step.cache) for step in plain]
            _check_alike(right, self.run(several), rows_error_max)
            _check_alike(right, [self.run([step])[0] for step in single], _ONE_ROW_ERROR_MAX)
        for cache in (cache for some in caches for cache in some):
            cache.clear()

    def _alone(self, tokens: Sequence[int], cache: KVCache) -> Tensor:
        model = self._model
        ids = torch.tensor([tokens], device=model.device) % model.vocab_tokens
        logits: Tensor = model.module(input_ids=ids, past_key_values=cache, use_cache=True).logits
        return logits[0, -1]


def _place(cache: KVCache) -> int:
    """Where a sequence's next token stands."""
    return int(cache.get_seq_length())


def _check_alike(right: Sequence[Tensor], said: Sequence[Tensor], error_max: float) -> None:
    for one, other in zip(right, said, strict=True):
        error = float((other.float() - one.float()).norm() / one.float().norm().clamp(min=1e-9))
        if not error <= error_max:
            raise ModelError(f"several sequences say something else than one (differs by {error:.1%})")


def _registered(name: str) -> str:
    """Tell transformers of an attention that is `name`, by rows where the keys are those of several."""
    ours = f"tiercel_rows_of_{name}"
    AttentionInterface.register(ours, partial(_attention, name))
    if (mask := ALL_MASK_ATTENTION_FUNCTIONS.get(name)) is not None:
        AttentionMaskInterface.register(ours, mask)
    return ours


def _attention(
    name: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **how: Any,
) -> tuple[Tensor, Any]:
    """What a model calls per layer."""
    alone = _attention_named(name, module)
    rows = getattr(key, MARK, None)
    if isinstance(rows, RowsLayer):
        how = {key: value for key, value in how.items() if key not in _OF_THE_BATCH}
        return rows.attend(alone, module, query, **how), None
    if query.shape[0] != 1:
        raise ModelError(f"{type(module).__name__} attends to more than KV as it is")
    return alone(module, query, key, value, attention_mask, **how)


def _attention_named(name: str, module: torch.nn.Module) -> Attention:
    """The function behind a name; `eager` is each model's own, beside its attention module."""
    own: Attention | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found = own if name == "eager" else ALL_ATTENTION_FUNCTIONS.get(name)
    if found is None:
        raise ModelError(f"{type(module).__name__} has no attention of the name {name}")
    return found
