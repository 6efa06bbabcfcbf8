"""What one vector of KV weighs in each storage format, scales included. Pure arithmetic, no torch.

Sizes of the scaled formats follow vLLM's cache specifications (`*_per_token_head`, `nvfp4`,
`turboquant_*`, `*_ds_mla`) and GGML's block formats (`q8_0` ...): the scales are stored beside the
values, so they are part of the size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from tiercel.errors import GeometryError


@dataclass(frozen=True, slots=True)
class KVDtype:
    """One storage format: bytes of one head's key or value of `dim` elements, for one token.

    `latent(rank, rope)` is the size of one MLA entry, None where the format is not defined for it.
    """

    name: str
    bits: int
    key: Callable[[int], Fraction]
    value: Callable[[int], Fraction]
    latent: Callable[[int, int], Fraction] | None
    note: str

    def latent_entry(self, rank: int, rope: int) -> Fraction:
        """Bytes of one MLA entry. Raises GeometryError where the format is not defined for it."""
        if self.latent is None:
            known = ", ".join(dtype.name for dtype in _DTYPES if dtype.latent is not None)
            raise GeometryError(
                f"kv dtype {self.name}: not defined for latent (MLA) layers; accepted: {known}"
            )
        return self.latent(rank, rope)


def _plain(name: str, bits: int, note: str) -> KVDtype:
    def side(dim: int) -> Fraction:
        return Fraction(dim * bits, 8)

    return KVDtype(name, bits, side, side, lambda rank, rope: side(rank + rope), note)


def _packed(dim: int, bits: int, extra_bytes: int) -> Fraction:
    """`dim` elements of `bits`, rounded up to whole bytes, plus `extra_bytes` of scales."""
    return Fraction(-(-dim * bits // 8) + extra_bytes)


def _scaled(name: str, bits: int, scale_bytes: int, note: str) -> KVDtype:
    def side(dim: int) -> Fraction:
        return _packed(dim, bits, scale_bytes)

    return KVDtype(name, bits, side, side, None, note)


def _turbo(name: str, key_bits: int, key_extra: int, value_bits: int) -> KVDtype:
    return KVDtype(
        name,
        value_bits,
        lambda dim: _packed(dim, key_bits, key_extra),
        lambda dim: _packed(dim, value_bits, 4),
        None,
        f"keys {key_bits} bit + {key_extra} B, values {value_bits} bit + 4 B per head",
    )


def _ggml(name: str, bits: int, block_bytes: int) -> KVDtype:
    def side(dim: int) -> Fraction:
        return Fraction(-(-dim // 32) * block_bytes)

    return KVDtype(
        name, bits, side, side, lambda rank, rope: side(rank + rope), f"{block_bytes} B per 32 elements"
    )


def _nvfp4_side(dim: int) -> Fraction:
    return _packed(dim, 4, -(-dim // 16))


def _nvfp4_latent(rank: int, rope: int) -> Fraction:
    return _nvfp4_side(rank) + rope


def _fp8_latent(rank: int, rope: int) -> Fraction:
    # Four-byte scale per 128 latent elements; the rope part stays 16-bit.
    return Fraction(rank + 4 * -(-rank // 128) + 2 * rope)


def _latent_only(name: str) -> Callable[[int], Fraction]:
    def refuse(_dim: int) -> Fraction:
        raise GeometryError(
            f"kv dtype {name}: only for latent (MLA) layers; accepted here: fp8, nvfp4 or wider"
        )

    return refuse


_DS8, _DS4 = _latent_only("fp8_ds_mla"), _latent_only("nvfp4_ds_mla")


_DTYPES = (
    _plain("float32", 32, "4 B per element"),
    _plain("bfloat16", 16, "2 B per element"),
    _plain("float16", 16, "2 B per element"),
    _plain("fp8", 8, "1 B per element, one scale per tensor"),
    _plain("int8", 8, "1 B per element, one scale per tensor"),
    _scaled("fp8_per_token_head", 8, 4, "1 B per element + 4 B per token and head, keys and values each"),
    _scaled("int8_per_token_head", 8, 4, "1 B per element + 4 B per token and head, keys and values each"),
    _scaled("int4_per_token_head", 4, 4, "½ B per element + 4 B per token and head, keys and values each"),
    KVDtype("nvfp4", 4, _nvfp4_side, _nvfp4_side, _nvfp4_latent, "½ B per element + 1 B per 16 elements"),
    KVDtype("fp8_ds_mla", 8, _DS8, _DS8, _fp8_latent, "latent 1 B + 4 B per 128, rope 2 B"),
    KVDtype("nvfp4_ds_mla", 4, _DS4, _DS4, _nvfp4_latent, "latent ½ B + 1 B per 16, rope 1 B"),
    _turbo("turboquant_k8v4", 8, 0, 4),
    _turbo("turboquant_4bit", 4, 2, 4),
    _turbo("turboquant_k3v4", 3, 2, 4),
    _turbo("turboquant_3bit", 3, 2, 3),
    _ggml("q8_0", 8, 34),
    _ggml("q5_1", 5, 24),
    _ggml("q5_0", 5, 22),
    _ggml("q4_1", 4, 20),
    _ggml("q4_0", 4, 18),
)
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "auto": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int4": "int4_per_token_head",
    "fp4": "nvfp4",
}
DTYPES: Mapping[str, KVDtype] = {dtype.name: dtype for dtype in _DTYPES}


def kv_dtype(name: str) -> KVDtype:
    """The format called `name` (or a common alias). Raises GeometryError that lists what is known."""
    key = name.strip().lower().removeprefix("torch.")
    found = DTYPES.get(_ALIASES.get(key, key))
    if found is None:
        raise GeometryError(f"kv dtype: {name!r}; accepted: {', '.join(DTYPES)}")
    return found
