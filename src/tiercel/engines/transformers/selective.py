"""A selective policy while this engine generates: prompts are read exactly, answers by what it keeps of them.

    prefill       exact, KV in host memory; a layer's own passes over the device for its attention
    prompt_done   layer by layer the policy decides: what it keeps goes to the device, the rest is dropped, or
                  stays in host memory where the policy fetches from it
    decoding      attention by the policy; new tokens are kept exactly, on the device

A prompt's KV is computed as without a policy, bit for bit, so its blocks are exact and shared with exact
servers. An answer's are not: they are neither settled nor stored. What a device holds is counted, and refused
beyond a limit. Where the device is the CPU it is the same memory, and the count is what a device would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from tiercel.attention.call import Call
from tiercel.attention.device import DeviceMemory
from tiercel.attention.fastgen import FastGen
from tiercel.attention.generating import CountingLayer
from tiercel.attention.marks import marks_of
from tiercel.attention.policy import Policy, RotateKeys
from tiercel.attention.registry import servable_policy
from tiercel.attention.rotation import key_rotation
from tiercel.attention.running import call_of
from tiercel.attention.serving import Served
from tiercel.attention.watching import Watching
from tiercel.attention.window import Full
from tiercel.codecs.consent import LossyAttention
from tiercel.engines.transformers.attention import GROUPED, grouped_attention
from tiercel.engines.transformers.identity import model_identity
from tiercel.engines.transformers.kv_cache import BufferedLayer, KVCache
from tiercel.engines.transformers.layout import BlockLayout
from tiercel.engines.transformers.model import LoadedModel
from tiercel.errors import ModelError

SELECTIVE = "tiercel_grouped_sdpa_then_policy"
# What a model's keys carry from the cache to its attention: the layer whose they are.
MARK = "_tiercel_selective"
_PROBE_TOKENS, _PROBE_STEPS = 24, 4
# Half precision rounds otherwise than the model's own kernel; a wrong mask or bias is far beyond that.
_PROBE_ERROR_MAX = 0.05


def selecting(
    model: LoadedModel, layout: BlockLayout, lossy: LossyAttention, limit_bytes: int | None
) -> Selecting:
    """What an engine needs for a policy. Raises ConfigError, EngineError or ModelError, see each."""
    lossy.check(model_identity(model, layout))
    return Selecting(model, layout, servable_policy(lossy.policy), lossy.share, limit_bytes)


class Selecting:
    """One model's policy with the share of a prompt's tokens that it may keep, or read per new token.

    The model gets an attention function that does both, for good. At most `limit_bytes` of KV are on the
    device at a time (None: no limit). `steps` counts tokens of answers so far, `moved_bytes` what was fetched
    for them. Raises ModelError for a model with attention of another kind, ConfigError for one in which the
    policy lacks something.
    """

    def __init__(
        self, model: LoadedModel, layout: BlockLayout, policy: Policy, share: float,
        limit_bytes: int | None = None,
    ) -> None:  # fmt: skip
        if model.attention != GROUPED:
            raise ModelError(f"{model.name}: with attention '{model.attention}' it can have no policy")
        self.policy, self.share = policy, share
        self._model = model
        self.rotate: RotateKeys | None = key_rotation(model.module)
        self._begin(None)
        self._use_our_attention(layout)
        self._begin(limit_bytes)

    def _begin(self, limit_bytes: int | None) -> None:
        self.memory = DeviceMemory(self._model.device, limit_bytes)
        self.steps = self.moved_bytes = 0

    def __str__(self) -> str:
        return f"{self.name}@{self.share:g}"

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.policy.name

    @property
    def device_peak_bytes(self) -> int:
        """The most KV that was on the device at a time."""
        return self.memory.peak_bytes

    def make_cache(self, layout: BlockLayout, device: torch.device) -> SelectiveCache:
        """A cache of one sequence."""
        return SelectiveCache(layout, device, self)

    def loadable_tokens(self, tokens: int) -> int:
        """How many of a prompt's first tokens may be loaded: the policy sees none of their queries."""
        return tokens - max(1, self.policy.watches(tokens))

    def count(self, served: Served) -> None:
        """Add what an answer took."""
        self.steps += served.steps
        self.moved_bytes += served.moved_bytes

    def watching(self, tokens: Sequence[int]) -> Watching:
        """What watches the prefill of a prompt."""
        real = torch.ones(1, len(tokens), dtype=torch.bool, device=self._model.device)
        special = punctuation = None
        if isinstance(self.policy, FastGen) and self._model.tokenizer is not None:
            special, punctuation = (one.to(real.device) for one in marks_of(self._model.tokenizer, tokens))
        return Watching(self.policy, self.share, real, special, punctuation, self.rotate)

    @torch.inference_mode()
    def _use_our_attention(self, layout: BlockLayout) -> None:
        """Put our attention in; see that keeping everything gives what the model says, and try the policy.

        Raises ModelError where the one fails, ConfigError where the other lacks something in this model.
        """
        model = self._model
        tokens = [(at + 5) % model.vocab_tokens for at in range(_PROBE_TOKENS)]
        ids = torch.tensor([tokens], device=model.device)
        expected = model.module(input_ids=ids, use_cache=False).logits[0, -1].float()
        model.module.set_attn_implementation(SELECTIVE)
        begun = tokens[: _PROBE_TOKENS - _PROBE_STEPS]
        real = torch.ones(1, len(begun), dtype=torch.bool, device=model.device)
        got = self._tried(layout, ids, Watching(Full(), 1.0, real))
        error = float((got - expected).norm() / expected.norm().clamp(min=1e-9))
        if not error <= _PROBE_ERROR_MAX:
            raise ModelError(
                f"{model.name}: its attention is of a kind that can have no policy (differs by {error:.1%})"
            )
        self._tried(layout, ids, self.watching(begun))

    def _tried(self, layout: BlockLayout, ids: Tensor, watching: Watching) -> Tensor:
        """Logits [vocabulary] of the last of `ids` [1, tokens], the last few of them being an answer."""
        cache, module = SelectiveCache(layout, self._model.device, self), self._model.module
        cache.begin(watching)
        begun = ids.shape[1] - _PROBE_STEPS
        module(input_ids=ids[:, :begun], past_key_values=cache, use_cache=True)
        cache.prompt_done()
        for at in range(begun, ids.shape[1]):
            got = module(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits
        logits: Tensor = got[0, -1].float()
        return logits


class SelectiveLayer(BufferedLayer):  # type: ignore[no-untyped-call]  # transformers has no types
    """One layer of a prompt that is being read, whose keys and values lie in host memory."""

    _owner: SelectiveCache

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [1, kv_heads, new, dim] to host memory; returns everything so far, on the device for now."""
        with self._owner.memory.visiting(*super().update(key_states, value_states)) as (keys, values):
            setattr(keys, MARK, self._owner)
            return keys, values

    def context(self) -> tuple[Tensor, Tensor]:
        """Keys and values so far, in host memory."""
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class AnsweringLayer(CountingLayer):  # type: ignore[no-untyped-call]  # transformers has no types
    """One layer while an answer is generated."""

    def __init__(self, owner: SelectiveCache, tokens: int) -> None:
        super().__init__(tokens)
        self._owner = owner

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count them and hand them on, marked."""
        setattr(key_states, MARK, self._owner)
        return super().update(key_states, value_states)


class SelectiveCache(KVCache):
    """One sequence's KV: a prompt's in host memory, then an answer's as the policy has it."""

    settles: ClassVar[bool] = False

    def __init__(self, layout: BlockLayout, device: torch.device, selecting: Selecting) -> None:
        self._selecting = selecting
        self.memory = selecting.memory
        self._watching: Watching | None = None
        self._served: Served | None = None
        super().__init__(layout, torch.device("cpu"))

    def _layer(self, slab: Any, index: int) -> SelectiveLayer:
        return SelectiveLayer(self, slab, index)

    def prompt_begins(self, tokens: Sequence[int]) -> None:
        """What follows is the prefill of `tokens`, and then its answer."""
        self.begin(self._selecting.watching(tokens))

    def begin(self, watching: Watching) -> None:
        """What follows is a prefill that `watching` sees."""
        self._watching = watching

    @torch.inference_mode()
    def prompt_done(self) -> None:
        """Let the policy decide, and keep what it says. Raises RequestError where the device has no room."""
        assert self._watching is not None
        tokens, served = self.length, Served(self.memory)
        self._served = served  # from here on `clear` gives back what it holds
        for number, layer in enumerate(self._buffered):
            assert isinstance(layer, SelectiveLayer)
            host = layer.context()
            with self.memory.visiting(*host) as (keys, values):
                if (window := self._watching.windows.get(number)) is not None:
                    served.keep_window(number, keys, values, window)
                else:
                    served.take(number, self._watching.prepare(number, keys, values), host)
        self._watching = None
        if not served.reads_host:
            self._release()
        self.layers = [AnsweringLayer(self, tokens) for _ in self._buffered]

    def make_room(self) -> None:
        """Make room for one token of an answer on the device. Raises RequestError where there is none."""
        assert self._served is not None
        self._served.make_room()

    def attend(self, call: Call) -> Tensor | None:
        """Attention by the policy; None while the prompt is read, which is watched where anybody does."""
        if self._served is not None:
            return self._served.attend(call)
        if self._watching is not None:
            self._watching.see(call)
        return None

    def clear(self) -> None:
        """Forget all tokens; the host's buffers stay."""
        if self._served is not None:
            self._selecting.count(self._served)
            self._served.close()
        self._served = self._watching = None
        self.layers = list(self._buffered)
        super().clear()

    def _release(self) -> None:
        """Give the host's buffers up: what was dropped is gone."""
        for slab in self._slabs:
            slab.grow(0, 0)
        for layer in self._buffered:
            layer.rebind()
        self.capacity = 0


def selective_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls per layer: the policy's attention for an answer, the exact one for all else."""
    owner = getattr(key, MARK, None)
    if isinstance(owner, SelectiveCache):
        call = call_of(module, query, key, value, scaling, softcap, sliding_window, kwargs)
        if (output := owner.attend(call)) is not None:
            return output, None
    return grouped_attention(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        softcap=softcap,
        sliding_window=sliding_window,
        **kwargs,
    )


AttentionInterface.register(SELECTIVE, selective_attention)
AttentionMaskInterface.register(SELECTIVE, sdpa_mask)
