"""The geometry of a model's KV cache: groups of layers that store alike, and what they weigh.

`KVGeometry` is the one answer to 'how large is it': calculator, arena, planner and connectors ask it.
It knows nothing of allocators (pages, padding) and never looks at weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

from tiercel.geometry.dtypes import KVDtype, kv_dtype


class GroupKind(StrEnum):
    """How the layers of a group store a sequence."""

    FULL = "full"  # keys and values of every token
    SLIDING = "sliding"  # keys and values of the last `window_tokens`
    CHUNKED = "chunked"  # keys and values of the current chunk, at most `window_tokens`
    LATENT = "latent"  # one compressed entry per token, shared by all heads (MLA)
    INDEX = "index"  # one selector key per token of a sparse-attention indexer
    STATE = "state"  # a recurrent state of fixed size per sequence
    CROSS = "cross"  # keys and values of encoder or image tokens
    SHARED = "shared"  # nothing: reads another layer's cache


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a recurrent state: `units` (heads, channels, groups) of `unit_elements` each.

    Tensor parallelism divides `units`; a part with fewer units than ranks is copied.
    """

    name: str
    units: int
    unit_elements: int
    element_bytes: int

    def nbytes(self, tp: int = 1) -> int:
        """Bytes of this part for one layer and one sequence on one of `tp` ranks."""
        return -(-self.units // tp) * self.unit_elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that store alike. `layers` are indices into the model (decoder side), ascending.

    For LATENT, `key_dim` is the latent rank and `value_dim` the rope part. `entry_bytes` fixes the size
    of an entry whatever the KV dtype (packed formats); `tokens_per_entry` > 1 means compressed time.
    `source_tokens` counts the encoder tokens of a CROSS group where the configuration fixes them.
    `alternative` is how the same layers store in an engine that keeps the other form (latent or expanded).
    """

    kind: GroupKind
    layers: tuple[int, ...]
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window_tokens: int | None = None
    state: tuple[StatePart, ...] = ()
    entry_bytes: int | None = None
    tokens_per_entry: int = 1
    source_tokens: int | None = None
    note: str = ""
    alternative: LayerGroup | None = None

    @property
    def state_bytes(self) -> int:
        """Fixed bytes per layer and sequence (recurrent state), on one unsharded rank."""
        return sum(part.nbytes() for part in self.state)

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank keeps a whole copy."""
        return self.kind in (GroupKind.LATENT, GroupKind.INDEX)

    @property
    def per_token(self) -> bool:
        """Whether the group stores something for each token of the sequence itself."""
        return self.kind not in (GroupKind.STATE, GroupKind.SHARED, GroupKind.CROSS)

    def heads_on_rank(self, tp: int = 1) -> int:
        """KV heads of one of `tp` ranks: max(1, heads // tp); heads are copied where tp exceeds them."""
        return self.kv_heads if self.replicated else max(1, self.kv_heads // tp)

    def layer_token_bytes(self, dtype: KVDtype, tp: int = 1) -> Fraction:
        """Bytes that one layer stores for one token (for CROSS: one source token) on one rank."""
        if self.kind in (GroupKind.STATE, GroupKind.SHARED):
            return Fraction(0)
        if self.entry_bytes is not None:
            return Fraction(self.entry_bytes, self.tokens_per_entry)
        if self.kind is GroupKind.LATENT:
            return dtype.latent_entry(self.key_dim, self.value_dim)
        if self.kind is GroupKind.INDEX and dtype.latent is None:
            return Fraction(self.key_dim * dtype.bits, 8)
        value = dtype.value(self.value_dim) if self.value_dim else Fraction(0)
        return self.heads_on_rank(tp) * (dtype.key(self.key_dim) + value)

    def token_bytes(self, dtype: KVDtype, tp: int = 1) -> Fraction:
        """Bytes that the whole group stores for one token on one rank."""
        return len(self.layers) * self.layer_token_bytes(dtype, tp)

    def fixed_bytes(self, dtype: KVDtype, tp: int = 1) -> int:
        """Bytes per sequence whatever its length: recurrent state, or cross keys of a fixed source."""
        if self.kind is GroupKind.CROSS:
            return _whole(self.token_bytes(dtype, tp) * (self.source_tokens or 0))
        return len(self.layers) * sum(part.nbytes(tp) for part in self.state)

    def sequence_bytes(self, tokens: int, dtype: KVDtype, tp: int = 1) -> Fraction:
        """Bytes of one sequence of `tokens` on one rank."""
        if not self.per_token:
            return Fraction(self.fixed_bytes(dtype, tp))
        held = tokens if self.window_tokens is None else min(tokens, self.window_tokens)
        return self.token_bytes(dtype, tp) * held


def _whole(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _dtype(dtype: str | KVDtype) -> KVDtype:
    return kv_dtype(dtype) if isinstance(dtype, str) else dtype


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What a model stores per token and per sequence. Build it with `from_config`.

    `max_tokens` is the model's own context limit, None where it has none. `fingerprint` digests every
    field of the configuration that can change the numbers in the cache (rope settings included).
    """

    model_type: str
    num_layers: int
    groups: tuple[LayerGroup, ...]
    max_tokens: int | None
    fingerprint: bytes = b""

    @classmethod
    def from_config(cls, source: Path | str | Mapping[str, Any]) -> KVGeometry:
        """Read a `config.json`, the folder that holds one, or its parsed content.

        Raises GeometryError, one line naming file, field, value and what is accepted; an unknown
        `model_type` is refused with what was found.
        """
        from tiercel.geometry.load import geometry_from_config

        return geometry_from_config(source)

    def bytes_per_token_exact(self, dtype: str | KVDtype = "bfloat16", tp: int = 1) -> Fraction:
        """Bytes that each further token adds for ever (layers that grow), maybe a fraction."""
        kv = _dtype(dtype)
        grows = [group for group in self.groups if group.per_token and group.window_tokens is None]
        return sum((group.token_bytes(kv, tp) for group in grows), Fraction(0))

    def bytes_per_token(self, dtype: str | KVDtype = "bfloat16", tp: int = 1) -> int:
        """`bytes_per_token_exact`, rounded up to a whole byte."""
        return _whole(self.bytes_per_token_exact(dtype, tp))

    def window_bytes_per_token_exact(self, dtype: str | KVDtype = "bfloat16", tp: int = 1) -> Fraction:
        """Bytes per token inside the window, of layers that stop growing."""
        kv = _dtype(dtype)
        capped = [group for group in self.groups if group.per_token and group.window_tokens is not None]
        return sum((group.token_bytes(kv, tp) for group in capped), Fraction(0))

    def window_bytes_per_token(self, dtype: str | KVDtype = "bfloat16", tp: int = 1) -> int:
        """`window_bytes_per_token_exact`, rounded up to a whole byte."""
        return _whole(self.window_bytes_per_token_exact(dtype, tp))

    @property
    def window_tokens(self) -> int | None:
        """The widest window of the layers that stop growing; None where all grow."""
        windows = [group.window_tokens for group in self.groups if group.window_tokens is not None]
        return max(windows, default=None)

    def fixed_state_bytes(self, dtype: str | KVDtype = "bfloat16", tp: int = 1) -> int:
        """Bytes per sequence whatever its length: recurrent states, cross keys of a fixed source."""
        kv = _dtype(dtype)
        return sum(group.fixed_bytes(kv, tp) for group in self.groups if not group.per_token)

    def sequence_bytes(self, tokens: int, dtype: str | KVDtype = "bfloat16", tp: int = 1) -> int:
        """Bytes of one sequence of `tokens` on one of `tp` ranks, rounded up to a whole byte."""
        kv = _dtype(dtype)
        return _whole(sum((group.sequence_bytes(tokens, kv, tp) for group in self.groups), Fraction(0)))

    def digest(self) -> bytes:
        """32 bytes that are equal for geometries whose KV bytes mean the same, in every process."""
        from tiercel.geometry.digest import geometry_digest

        return geometry_digest(self)
