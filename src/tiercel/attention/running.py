"""A transformers model under a selective policy, teacher-forced: the prompt once and exactly, then each
policy.

    judge = TeacherForced(module)
    prompt = judge.prefill(ids, settings=[Setting(policy, 0.25), ...])
    answer = judge.answer(prompt, number, question_and_answer_ids)   # one forward

A policy sees the context at the end of the prefill, not the question. The prompt's KV is never changed: each
answer gets a cache object of its own on the same tensors, which grows by copying. Layers with a sliding
window of the model's own stay as they are; policies decide for the others. Not for serving: all KV stays in
memory, selection is a mask. A model is given our attention function for good; use one that nobody else runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from tiercel.attention.call import Call
from tiercel.attention.numbers import as_bias, attend, attention_weights, causal, grouped
from tiercel.attention.policy import Bytes, LayerContext, Observer, Policy, Prefill, Prepared, budget_tokens
from tiercel.attention.rotation import key_rotation
from tiercel.errors import ModelError

# Without a mask function of this name transformers builds no mask: causality is ours, and heads may differ.
NAME = "tiercel_selective"
_LAYER_KINDS = {"full_attention", "sliding_attention"}
# What a model passes beside the usual, and that we either do or need not do.
_UNDERSTOOD = {"position_ids", "cache_position", "use_cache", "output_attentions", "is_causal"}
_PROBE_TOKENS = 24
# bf16 rounds scores differently than the model's own kernel; a wrong mask or bias is far beyond that.
_PROBE_ERROR_MAX = 0.05


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy with the share of the context's tokens that it may keep, or read per query."""

    policy: Policy
    share: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """A context that was read, with what each setting decided, per layer.

    logits   of its last token, [batch, vocabulary]
    windows  the layers with a window of the model's own, and how many tokens it has
    """

    layers: tuple[LayerContext, ...]
    real: Tensor
    prepared: tuple[dict[int, Prepared], ...]
    logits: Tensor
    windows: Mapping[int, int]

    @property
    def tokens(self) -> int:
        """Length of the padded context."""
        return int(self.real.shape[1])

    def bytes_of(self, number: int) -> Bytes:
        """Where the context's KV lies under setting `number`, all layers together, by the policy's
        definition.
        """
        total = Bytes()
        for index, layer in enumerate(self.layers):
            prepared = self.prepared[number].get(index)
            total += prepared.bytes if prepared else Bytes(device=_layer_bytes(layer))
        return total

    @property
    def full_bytes(self) -> float:
        """Bytes of all of the context's KV as it is."""
        return sum(_layer_bytes(layer) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Answer:
    """Logits [batch, new, vocabulary], and the share of the context that was read, on average."""

    logits: Tensor
    read_share: float


class TeacherForced:
    """Runs `module`, a loaded causal language model of transformers. Raises ModelError if it is of no use
    here.
    """

    def __init__(self, module: Any) -> None:
        config = module.config.get_text_config(decoder=True)
        kinds = set(getattr(config, "layer_types", None) or ())
        if strange := sorted(kinds - _LAYER_KINDS):
            raise ModelError(
                f"{config.model_type}: layers of kind {', '.join(strange)} cannot be judged; accepted: "
                f"{', '.join(sorted(_LAYER_KINDS))}"
            )
        self.module = module
        with torch.inference_mode():
            self._use_our_attention(config.model_type)
        self._rotate = key_rotation(module)

    @property
    def device(self) -> torch.device:
        """Where token ids are expected."""
        device: torch.device = self.module.get_input_embeddings().weight.device
        return device

    def _use_our_attention(self, name: str) -> None:
        """Put our function in, and see that the model still says the same."""
        ids = (torch.arange(_PROBE_TOKENS, device=self.device) + 5)[None]
        before = self.module(input_ids=ids, use_cache=False).logits.float()
        self.module.set_attn_implementation(NAME)
        after = self.module(input_ids=ids, use_cache=False).logits.float()
        error = float((after - before).norm() / before.norm().clamp(min=1e-9))
        if not error <= _PROBE_ERROR_MAX:
            raise ModelError(
                f"{name}: its attention is of a kind that cannot be judged (differs by {error:.1%})"
            )

    @torch.inference_mode()
    def prefill(
        self, ids: Tensor, settings: Sequence[Setting], *, real: Tensor | None = None,
        special: Tensor | None = None, punctuation: Tensor | None = None,
    ) -> Prompt:  # fmt: skip
        """Read contexts `ids` [batch, tokens] with full attention and let every setting decide.

        `real` [batch, tokens] bool marks what is not padding (on the left); `special` and `punctuation` as in
        LayerContext.
        """
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        if not bool(real.any(-1).all()) or not bool(real[:, -1].all()):
            raise ValueError("contexts must be padded on the left and not be empty")
        run = _Prefill(real, settings)
        cache = DynamicCache()
        with attending(run):
            logits = self.module(
                input_ids=ids, position_ids=(real.cumsum(-1) - 1).clamp(min=0), past_key_values=cache,
                use_cache=True, logits_to_keep=1,
            ).logits  # fmt: skip
        layers = tuple(
            LayerContext(index, layer.keys, layer.values, real, special, punctuation, self._rotate)
            for index, layer in enumerate(_layers(cache))
        )
        prepared = tuple(run.prepared(number, layers) for number in range(len(settings)))
        return Prompt(layers, real, prepared, logits[:, -1], run.windows)

    @torch.inference_mode()
    def answer(self, prompt: Prompt, number: int, new_ids: Tensor) -> Answer:
        """Logits of `new_ids` [batch, new] behind the prompt, under setting `number`."""
        run = _Answer(prompt.tokens, prompt.real, prompt.prepared[number])
        cache = DynamicCache([(layer.keys, layer.values) for layer in prompt.layers])
        places = prompt.real.sum(-1, keepdim=True) + torch.arange(new_ids.shape[1], device=new_ids.device)
        with attending(run):
            logits = self.module(
                input_ids=new_ids, position_ids=places, past_key_values=cache, use_cache=True
            ).logits
        return Answer(logits, run.read / run.asked if run.asked else 1.0)


class Run(Protocol):
    """What attends, while a model runs for us."""

    def attend(self, call: Call) -> Tensor:
        """Output [batch, new, heads, value_dim]."""
        ...


_current: ContextVar[Run | None] = ContextVar("tiercel_selective_run", default=None)


@contextmanager
def attending(run: Run) -> Iterator[None]:
    """Let `run` attend in the model that is run inside, which has our attention function."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


class _Prefill:
    """Plain causal attention that lets the observers watch."""

    def __init__(self, real: Tensor, settings: Sequence[Setting]) -> None:
        self.real, self.settings = real, settings
        self.observers: dict[tuple[int, int], Observer] = {}
        self.windows: dict[int, int] = {}
        self._padded = not bool(real.all())
        self._biases: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, call: Call) -> Tensor:
        watching = self._watching(call)
        outputs = []
        for first, queries in call.parts():
            end = first + queries.shape[3]
            keys, values = call.keys[:, :, :end], call.values[:, :, :end]
            weights = attention_weights(
                queries, keys, self._bias(first, end, call.window), call.scale, call.softcap
            )
            if self._padded:
                weights *= self.real[:, None, None, first:end, None]
            for observer in watching:
                observer.see(weights, first)
            outputs.append(attend(weights, values))
        return torch.cat(outputs, 1)

    def _bias(self, first: int, end: int, window: int | None) -> Tensor:
        """The same for all layers, so made once."""
        if (known := self._biases.get((first, window))) is not None:
            return known
        seen = causal(first, end - first, end, window, self.real.device)[None] & self.real[:, None, :end]
        # Padding sees itself, so that no row is empty.
        seen |= torch.arange(first, end, device=seen.device)[:, None] == torch.arange(end, device=seen.device)
        self._biases[first, window] = bias = as_bias(seen)[:, None, None]
        return bias

    def _watching(self, call: Call) -> list[Observer]:
        if call.window is not None:
            self.windows[call.layer] = call.window
            return []
        kv_heads = call.keys.shape[1]
        for number, setting in enumerate(self.settings):
            prefill = Prefill(self.real, kv_heads, budget_tokens(setting.share, self.real, kv_heads))
            if (observer := setting.policy.observer(prefill)) is not None:
                self.observers[number, call.layer] = observer
        return [one for (_, layer), one in self.observers.items() if layer == call.layer]

    def prepared(self, number: int, layers: Sequence[LayerContext]) -> dict[int, Prepared]:
        """What setting `number` decides, by layer; the model's own window layers are left out."""
        setting = self.settings[number]
        return {
            one.layer: setting.policy.prepare(
                one,
                budget_tokens(setting.share, self.real, one.keys.shape[1]),
                self.observers.get((number, one.layer)),
            )
            for one in layers
            if one.layer not in self.windows
        }


@dataclass(slots=True)
class _Answer:
    """New tokens that attend to what the policy lets them see of the context, and to each other."""

    tokens: int
    real: Tensor
    prepared: dict[int, Prepared]
    read: float = field(default=0.0)
    asked: float = field(default=0.0)

    def attend(self, call: Call) -> Tensor:
        prepared = self.prepared.get(call.layer)
        keys, values = call.keys, call.values
        if prepared is not None:
            keys = torch.cat([prepared.keys, keys[:, :, self.tokens :]], 2)
            values = torch.cat([prepared.values, values[:, :, self.tokens :]], 2)
        outputs = []
        for first, queries in call.parts():
            allowed = seen_by(prepared, self.real, queries, first, keys.shape, call.window)
            if prepared is not None:
                self.read += float(allowed[..., : self.tokens].sum())
                self.asked += float(self.real.sum()) * keys.shape[1] * queries.shape[3]
            bias = as_bias(allowed)[:, :, None]
            weights = attention_weights(queries, keys, bias, call.scale, call.softcap)
            outputs.append(attend(weights, values))
        return torch.cat(outputs, 1)


def seen_by(
    prepared: Prepared | None, real: Tensor, queries: Tensor, first: int, keys_shape: Sequence[int],
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """What new tokens attend to: bool [batch, kv_heads or 1, new, all], context first, then the new ones.

    `queries` [batch, kv_heads, group, new, dim] begin with new token `first`. The context: what `prepared`
    lets them see (None: all of it that is real); of the new tokens, themselves and those before. `window`:
    the model's own.
    """
    batch, kv_heads, total = keys_shape[0], keys_shape[1], keys_shape[2]
    new, tokens = queries.shape[3], real.shape[1]
    seen = causal(tokens + first, new, total, window, real.device)[None, None]
    allowed = seen.expand(batch, kv_heads if prepared else 1, new, total).clone()
    context = allowed[..., :tokens]
    context &= real[:, None, None]
    if prepared is not None:
        context &= prepared.visible(queries)
    return allowed


class _Plain:
    """Causal attention over what is there, for a model that is run by somebody else meanwhile."""

    def attend(self, call: Call) -> Tensor:
        seen = causal(call.before, call.queries.shape[3], call.keys.shape[2], call.window, call.keys.device)
        bias = as_bias(seen)[None, None, None]
        return attend(attention_weights(call.queries, call.keys, bias, call.scale, call.softcap), call.values)


def selective_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
    sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls per layer: query [batch, heads, new, dim], key [batch, kv_heads, all, dim]."""
    call = call_of(module, query, key, value, scaling, softcap, sliding_window, kwargs)
    return (_current.get() or _Plain()).attend(call), None


def call_of(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None,
    softcap: float | None, sliding_window: int | None, others: Mapping[str, Any],
) -> Call:  # fmt: skip
    """What transformers gives an attention function. Raises ModelError for attention of another kind."""
    if odd := sorted(name for name in others.keys() - _UNDERSTOOD if others[name] is not None):
        raise ModelError(
            f"{type(module).__name__}: attention with {', '.join(odd)} cannot be judged, nor have a policy"
        )
    layer: Any = module.layer_idx
    return Call(
        layer=int(layer),
        queries=grouped(query, key.shape[1]),
        keys=key,
        values=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        window=sliding_window,
    )


AttentionInterface.register(NAME, selective_attention)


def _layers(cache: DynamicCache) -> list[Any]:
    return list(cache.layers)


def _layer_bytes(layer: LayerContext) -> float:
    per_token = sum(one.shape[1] * one.shape[-1] * one.element_size() for one in (layer.keys, layer.values))
    return float(layer.real.sum()) * per_token
