"""What a selective policy is: it sees a layer's context and says what each later query may attend to.

    policy.observer(...)  optional: watches the attention of the prefill (heavy hitters need it)
    policy.prepare(...)   once per layer, at the end of the prefill, before the question is known
    prepared.visible(q)   which tokens of the context the queries may attend to

Keys are post-RoPE and stay at their original positions; a policy that moves them says so. Tokens after the
context are always attended to. Shapes: batch, kv_heads, group (query heads per KV head), new (queries),
tokens (of the context), dim. Rows of a batch may be padded on the left; padding is never selected.
Nothing here runs a model, and nothing keeps a reference to a cache that it would change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

RotateKeys = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerContext:
    """One layer's KV at the end of the prefill. Tensors belong to the caller and are not to be changed.

    keys      [batch, kv_heads, tokens, dim], post-RoPE
    values    [batch, kv_heads, tokens, value_dim]
    real      [batch, tokens] bool: False is padding, on the left
    special   [batch, tokens] bool: tokens such as the beginning of the text; None: not known
    punctuation  [batch, tokens] bool: tokens without a letter or digit; None: not known
    rotate    moves post-RoPE keys [batch, kv_heads, tokens, dim] on by [batch, kv_heads] positions; None: not
              possible
    """

    layer: int
    keys: Tensor
    values: Tensor
    real: Tensor
    special: Tensor | None = None
    punctuation: Tensor | None = None
    rotate: RotateKeys | None = None

    @property
    def heads_shape(self) -> tuple[int, int, int]:
        """(batch, kv_heads, tokens)."""
        batch, kv_heads, tokens, _ = self.keys.shape
        return batch, kv_heads, tokens


@dataclass(frozen=True, slots=True)
class Bytes:
    """Where a layer's KV lies under a policy, by its definition (not measured), in bytes.

    device   what must be in device memory between and during steps, for the context
    host     what is kept elsewhere and may be fetched
    fetched  what one new token moves from host to device, nothing being cached there
    """

    device: float = 0.0
    host: float = 0.0
    fetched: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host, self.fetched + other.fetched)


class Prepared(Protocol):
    """A policy's decision for one layer. `keys` and `values` are what attention reads (quantized, moved)."""

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def bytes(self) -> Bytes: ...

    def visible(self, queries: Tensor) -> Tensor:
        """Which tokens may be read: bool [batch, kv_heads, new or 1, tokens].

        `queries`: [batch, kv_heads, group, new, dim], post-RoPE.
        """
        ...


class Observer(Protocol):
    """Sees the attention of one layer's prefill, some queries at a time, in order."""

    def see(self, weights: Tensor, first: int) -> None:
        """`weights`: [batch, kv_heads, group, some, first + some], rows of padding zero.

        `first` is the place of the first of these queries in the context, padding counted.
        """
        ...


@dataclass(frozen=True, slots=True)
class Prefill:
    """What an observer knows before it starts: which tokens are real [batch, tokens], and the KV heads."""

    real: Tensor
    kv_heads: int
    budget: Tensor


class Policy(Protocol):
    """A method with its parameters. `drops`: what is not selected is gone; else it is only not read."""

    @property
    def name(self) -> str: ...
    @property
    def drops(self) -> bool: ...

    def observer(self, prefill: Prefill) -> Observer | None:
        """A fresh observer for one layer, or None if the policy needs to see nothing."""
        ...

    def watches(self, tokens: int) -> int:
        """How many of the last of `tokens` queries an observer must see; of the others nothing is used."""
        ...

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Prepared:
        """Decide. `budget` [batch, kv_heads]: tokens of the context each head may keep, or read per query."""
        ...


class Blind:
    """Base of policies that need not see the prefill."""

    __slots__ = ()

    def observer(self, prefill: Prefill) -> None:
        return None

    def watches(self, tokens: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """A set of tokens per head, chosen once, whatever is asked. keep: bool [batch, kv_heads, tokens]."""

    keys: Tensor
    values: Tensor
    keep: Tensor
    bytes: Bytes

    def visible(self, queries: Tensor) -> Tensor:
        return self.keep.unsqueeze(2)


def fixed(context: LayerContext, keep: Tensor) -> Fixed:
    """Keep these tokens of exact KV on the device and drop the others."""
    return Fixed(context.keys, context.values, keep, Bytes(device=float(keep.sum()) * token_bytes(context)))


def token_bytes(context: LayerContext) -> float:
    """Bytes of one token's K and V in one head, as they are."""
    keys, values = context.keys, context.values
    return float(keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size())


def real_tokens(real: Tensor) -> Tensor:
    """How many tokens of each row are real: [batch]."""
    return real.sum(-1)


def budget_tokens(share: float, real: Tensor, kv_heads: int) -> Tensor:
    """`share` of each row's tokens, rounded, at least one: [batch, kv_heads]."""
    count = real_tokens(real)
    wanted = (count * share).round().long().clamp(min=1)
    return torch.minimum(wanted, count)[:, None].expand(-1, kv_heads).contiguous()


def newest(real: Tensor, count: Tensor) -> Tensor:
    """The last `count` [batch, kv_heads] real tokens: bool [batch, kv_heads, tokens]."""
    age = real.flip(-1).cumsum(-1).flip(-1)  # 1 is the last token
    return (age[:, None] <= count[..., None]) & real[:, None]


def oldest(real: Tensor, count: Tensor) -> Tensor:
    """The first `count` [batch, kv_heads] real tokens: bool [batch, kv_heads, tokens]."""
    return (real.cumsum(-1)[:, None] <= count[..., None]) & real[:, None]


def top(scores: Tensor, allowed: Tensor, count: Tensor) -> Tensor:
    """The `count` [...] highest of `scores` [..., tokens] among the allowed, or all of them."""
    tokens = scores.shape[-1]
    most = min(int(count.max()), tokens)
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    if most <= 0:
        return chosen
    order = scores.masked_fill(~allowed, -torch.inf).topk(most, dim=-1).indices
    wanted = torch.arange(most, device=scores.device) < count[..., None]
    return chosen.scatter_(-1, order, wanted.expand(order.shape)) & allowed


def group_scores(logits: Tensor, allowed: Tensor) -> Tensor:
    """One score per KV head out of its query heads': the largest log-softmax over the group.

    `logits` [batch, kv_heads, group, new, n], `allowed` bool broadcastable to it; returns [batch, kv_heads,
    new, n]. Heads of a group differ in the scale of their logits; as shares of attention they can be
    compared.
    """
    return logits.masked_fill(~allowed, -torch.inf).log_softmax(-1).nan_to_num(nan=-torch.inf).amax(2)
