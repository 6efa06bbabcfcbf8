"""How an engine stores a geometry, where that differs from the plain sizes. No engine is imported.

`exact` is what the layers need, in the form serving engines keep it, without any rounding. The others
turn the same geometry into what that engine really allocates for a sequence: `vllm` (paged blocks, the
window plus the tokens in flight, hybrid pages), `transformers` (a window keeps one token less, latents
stay compressed, selector keys in 16 bits), `llama.cpp` (latents expanded, windows padded, 32-bit states)
and `llama.cpp-mla` (the same with model files converted for MLA, which keep the latent).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from tiercel.errors import GeometryError
from tiercel.geometry.dtypes import KVDtype
from tiercel.geometry.model import GroupKind, KVGeometry, LayerGroup, StatePart

VLLM_BLOCK_TOKENS = 16
VLLM_IN_FLIGHT_TOKENS = 2048
_V4_PAGE_BYTES, _V4_BLOCK_TOKENS = 576, 256
_LLAMACPP_PAD_TOKENS, _LLAMACPP_IN_FLIGHT_TOKENS = 256, 512
_LLAMACPP_STATE_BYTES = 4


class Engine(StrEnum):
    """Whose storage is asked about."""

    EXACT = "exact"
    VLLM = "vllm"
    TRANSFORMERS = "transformers"
    LLAMACPP = "llama.cpp"
    LLAMACPP_MLA = "llama.cpp-mla"


@dataclass(frozen=True, slots=True)
class Stored:
    """A geometry as one engine stores it, and the tokens that the engine holds for a sequence.

    `block_tokens` is the unit in which attention memory is given out (1 where there is none);
    `notes` say in words what differs from the plain sizes.
    """

    engine: Engine
    geometry: KVGeometry
    block_tokens: int
    in_flight_tokens: int
    notes: tuple[str, ...]

    def held_tokens(self, group: LayerGroup, tokens: int) -> int:
        """Tokens for which the engine holds space in `group` when a sequence has `tokens`."""
        if not group.per_token or tokens == 0:
            return 0
        block = self.block_tokens
        if group.window_tokens is None:
            return _up(tokens, block)
        if self.engine is Engine.VLLM and group.kind is GroupKind.SLIDING:
            return _up(min(group.window_tokens - 1 + self.in_flight_tokens, tokens), block) + block
        if self.engine in (Engine.VLLM, Engine.LLAMACPP, Engine.LLAMACPP_MLA):
            return min(_up(group.window_tokens + self.in_flight_tokens, block), _up(tokens, block))
        return min(group.window_tokens, tokens)

    def group_bytes(self, group: LayerGroup, tokens: int, dtype: KVDtype, tp: int = 1) -> Fraction:
        """Bytes that `group` takes for one sequence of `tokens` on one of `tp` ranks."""
        if not group.per_token:
            return Fraction(group.fixed_bytes(dtype, tp))
        return group.token_bytes(dtype, tp) * self.held_tokens(group, tokens)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def as_stored(
    geometry: KVGeometry,
    engine: Engine | str,
    dtype: KVDtype,
    tp: int = 1,
    block_tokens: int | None = None,
    in_flight_tokens: int | None = None,
) -> Stored:
    """`geometry` as `engine` stores it. Raises GeometryError for an engine that cannot hold the family.

    `block_tokens` and `in_flight_tokens` (tokens of one engine step) are vLLM's settings.
    """
    engine = engine_named(engine)
    if engine is Engine.VLLM:
        in_flight = VLLM_IN_FLIGHT_TOKENS if in_flight_tokens is None else in_flight_tokens
        return _vllm(geometry, dtype, tp, block_tokens or VLLM_BLOCK_TOKENS, in_flight)
    if engine is Engine.EXACT:
        return Stored(engine, geometry, 1, 0, ())
    _refuse_packed_time(geometry, engine)
    if engine is Engine.TRANSFORMERS:
        return _transformers(geometry)
    return _llamacpp(geometry, engine)


def engine_named(name: Engine | str) -> Engine:
    """The profile called `name`. Raises GeometryError that lists them."""
    aliases = {"llamacpp": "llama.cpp", "hf": "transformers", "llamacpp-mla": "llama.cpp-mla"}
    key = str(name).strip().lower()
    try:
        return Engine(aliases.get(key, key))
    except ValueError:
        raise GeometryError(f"engine: {name!r}; accepted: {', '.join(Engine)}") from None


def _refuse_packed_time(geometry: KVGeometry, engine: Engine) -> None:
    if any(group.tokens_per_entry > 1 for group in geometry.groups):
        raise GeometryError(
            f"engine: '{engine}': how it stores {geometry.model_type} is not known; accepted: exact, vllm"
        )


def _mapped(geometry: KVGeometry, change: Callable[[LayerGroup], LayerGroup | None]) -> KVGeometry:
    changed = (change(group) for group in geometry.groups)
    return replace(geometry, groups=tuple(group for group in changed if group is not None))


def _vllm(geometry: KVGeometry, dtype: KVDtype, tp: int, block: int, in_flight: int) -> Stored:
    notes = [f"blocks of {block} tokens; a window also holds the {in_flight} tokens in flight and one block"]
    if any(group.tokens_per_entry > 1 for group in geometry.groups):
        geometry = _mapped(geometry, _v4_padded)
        notes.append(f"pages of compressed entries padded to {_V4_PAGE_BYTES} B")
    states = [group for group in geometry.groups if group.kind is GroupKind.STATE]
    grows = [group for group in geometry.groups if group.per_token]
    if states and grows:
        token_bytes = min(group.layer_token_bytes(dtype, tp) for group in grows)
        page = max(sum(part.nbytes(tp) for part in group.state) for group in states)
        block = _up(-(-page // token_bytes), block)
        padded = -(-(block * token_bytes).numerator // (block * token_bytes).denominator)
        notes.append(f"attention blocks grow to {block:,} tokens so that a block holds a recurrent state")
        geometry = _mapped(geometry, lambda group: _padded_state(group, padded))
    return Stored(Engine.VLLM, geometry, block, in_flight, tuple(notes))


def _v4_padded(group: LayerGroup) -> LayerGroup:
    if group.tokens_per_entry == 1 or group.entry_bytes is None:
        return group
    entries = _V4_BLOCK_TOKENS // group.tokens_per_entry
    page = _up(entries * group.entry_bytes, _V4_PAGE_BYTES)
    return replace(group, entry_bytes=page, tokens_per_entry=_V4_BLOCK_TOKENS)


def _padded_state(group: LayerGroup, page_bytes: int) -> LayerGroup:
    if group.kind is not GroupKind.STATE:
        return group
    # One part of one unit, so that a rank's share is the page itself.
    return replace(group, state=(StatePart("page", 1, page_bytes, 1),))


def _transformers(geometry: KVGeometry) -> Stored:
    def change(group: LayerGroup) -> LayerGroup:
        if group.kind is GroupKind.FULL and group.alternative is not None:
            group = replace(group.alternative, layers=group.layers)
        if group.kind is GroupKind.INDEX:
            return replace(group, entry_bytes=None, note="selector key in the model's dtype")
        if group.window_tokens is not None:
            return replace(group, window_tokens=max(1, group.window_tokens - 1))
        return group

    notes = ("a window keeps one token less; latents stay compressed; selector keys are not quantised",)
    return Stored(Engine.TRANSFORMERS, _mapped(geometry, change), 1, 0, notes)


def _llamacpp(geometry: KVGeometry, engine: Engine) -> Stored:
    expand = engine is Engine.LLAMACPP

    def change(group: LayerGroup) -> LayerGroup | None:
        if group.kind is GroupKind.INDEX:
            return None
        if group.kind is GroupKind.STATE:
            parts = tuple(replace(part, element_bytes=_LLAMACPP_STATE_BYTES) for part in group.state)
            return replace(group, state=parts)
        if expand and group.kind is GroupKind.LATENT and group.alternative is not None:
            return replace(group.alternative, layers=group.layers)
        return group

    notes = [
        f"context in steps of {_LLAMACPP_PAD_TOKENS} tokens; a window also holds a micro-batch of "
        f"{_LLAMACPP_IN_FLIGHT_TOKENS}; recurrent states are 32-bit; no selector keys"
    ]
    if expand and any(group.kind is GroupKind.LATENT for group in geometry.groups):
        notes.append("latents are expanded to heads; model files converted for MLA: --engine llama.cpp-mla")
    return Stored(
        engine, _mapped(geometry, change), _LLAMACPP_PAD_TOKENS, _LLAMACPP_IN_FLIGHT_TOKENS, tuple(notes)
    )
