"""How keys and values lie inside a layer's KV cache, by the attention backend that writes them.

vLLM gives every layer a tensor [blocks, heads, tokens, content] and leaves the content to the backend. Codecs
that scale numbers must know which of them belong together, so this is read from each backend's code, by name.
What is not listed here is not known. Touches no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class Interior(Enum):
    """What the content of a block of one head is."""

    # K and V of a token side by side, tokens and heads as the tensor's strides say.
    SIDE_BY_SIDE = auto()
    # All tokens of K, channel by channel, then all of V, token by token.
    KEYS_BY_CHANNEL = auto()


_SIDE_BY_SIDE = {"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"}
# Instruction sets whose kernels on CPUs have no packing of their own.
_CPU, _CPU_PLAIN = "CPU_ATTN", {"vec", "vec16"}


def interiors(layers: Mapping[str, object]) -> dict[str, Interior]:
    """What is known of vLLM's attention layers, by their names."""
    found = {name: _interior(layer) for name, layer in layers.items()}
    return {name: interior for name, interior in found.items() if interior is not None}


def _interior(layer: object) -> Interior | None:
    backend = getattr(layer, "get_attn_backend", None)
    if backend is None:
        return None
    name = backend().get_name()
    if name == _CPU and getattr(layer, "isa", None) in _CPU_PLAIN:
        return Interior.KEYS_BY_CHANNEL
    return Interior.SIDE_BY_SIDE if name in _SIDE_BY_SIDE else None
