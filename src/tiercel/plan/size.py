"""How large a model's KV cache is: per token, per sequence, per rank, in all; and what fits.

Pure arithmetic over a `KVGeometry`: no files, no torch, no printing. `describe` turns the result into
text, `as_json` into the keys that scripts read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tiercel.errors import ConfigError
from tiercel.geometry import GroupKind, KVDtype, KVGeometry, LayerGroup
from tiercel.geometry.engines import Engine, Stored, as_stored
from tiercel.plan.parallel import Parallel, RankShare, rank_sequence_bytes, rank_share
from tiercel.plan.weights import Parameters, WeightFormat

TOKENS_MAX = 10**12
BATCH_MAX = 10**9


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What one group of layers stores: per token, per sequence whatever its length, and for one sequence."""

    group: LayerGroup
    bytes_per_token: Fraction
    fixed_bytes: int
    sequence_bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class WeightRow:
    """Weights in one format against the KV cache.

    `sequences` of the asked length, or one sequence of `tokens` (None: it never does, its windows are
    full before), weigh as much as the weights.
    """

    format: WeightFormat
    nbytes: int
    sequences: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits into `kv_bytes` of KV memory per rank: sequences of the asked length, one sequence alone.

    `tokens` None means that one sequence of any length fits. `memory_bytes` and `weights_bytes` are per
    rank, None where the KV memory itself was given.
    """

    kv_bytes: int
    sequences: int
    tokens: int | None
    memory_bytes: int | None = None
    weights_bytes: int | None = None
    told: str = ""


@dataclass(frozen=True, slots=True)
class SizeReport:
    """Everything `tiercel size` knows about one model and one workload of `batch` × `tokens`."""

    geometry: KVGeometry
    stored: Stored
    dtype: KVDtype
    tokens: int
    batch: int
    parallel: Parallel
    groups: tuple[GroupSize, ...]
    bytes_per_token: Fraction
    window_bytes_per_token: Fraction
    window_tokens: int | None
    fixed_state_bytes: int
    sequence_bytes: int
    share: RankShare

    @property
    def total_bytes(self) -> int:
        """One copy of all sequences: what a store keeps, however the ranks divide or copy it."""
        return self.sequence_bytes * self.batch


def measure(
    geometry: KVGeometry,
    dtype: KVDtype,
    tokens: int,
    batch: int = 1,
    parallel: Parallel | None = None,
    engine: Engine | str = Engine.EXACT,
    block_tokens: int | None = None,
    in_flight_tokens: int | None = None,
) -> SizeReport:
    """Size the KV cache of `batch` sequences of `tokens`. Raises ConfigError or GeometryError."""
    for name, value, least, top in (("--tokens", tokens, 0, TOKENS_MAX), ("--batch", batch, 1, BATCH_MAX)):
        if not least <= value <= top:
            raise ConfigError(f"{name}: {value}; accepted: a whole number from {least} to {top}")
    parallel = parallel or Parallel()
    whole = as_stored(geometry, engine, dtype, 1, block_tokens, in_flight_tokens)
    split = as_stored(geometry, engine, dtype, parallel.tp, block_tokens, in_flight_tokens)
    share = rank_share(split, tokens, batch, dtype, parallel)
    groups = tuple(_group_size(whole, group, tokens, dtype) for group in whole.geometry.groups)
    stored = whole.geometry
    return SizeReport(
        geometry=geometry,
        stored=split,
        dtype=dtype,
        tokens=tokens,
        batch=batch,
        parallel=parallel,
        groups=groups,
        bytes_per_token=stored.bytes_per_token_exact(dtype),
        window_bytes_per_token=stored.window_bytes_per_token_exact(dtype),
        window_tokens=stored.window_tokens,
        fixed_state_bytes=stored.fixed_state_bytes(dtype),
        sequence_bytes=_sequence_bytes(whole, tokens, dtype),
        share=share,
    )


def _sequence_bytes(stored: Stored, tokens: int, dtype: KVDtype) -> int:
    exact = sum((stored.group_bytes(g, tokens, dtype) for g in stored.geometry.groups), Fraction(0))
    return -(-exact.numerator // exact.denominator)


def _group_size(stored: Stored, group: LayerGroup, tokens: int, dtype: KVDtype) -> GroupSize:
    held = stored.group_bytes(group, tokens, dtype)
    return GroupSize(
        group=group,
        bytes_per_token=group.token_bytes(dtype) if group.per_token else Fraction(0),
        fixed_bytes=0 if group.per_token else group.fixed_bytes(dtype),
        sequence_bytes=-(-held.numerator // held.denominator),
        formula=formula(group, dtype),
    )


def formula(group: LayerGroup, dtype: KVDtype) -> str:
    """How the group's bytes come about, with the numbers in it."""
    layers = f"{len(group.layers)} layer{'s' if len(group.layers) != 1 else ''}"
    if group.kind is GroupKind.SHARED:
        return f"{layers} read another layer's cache"
    if group.kind is GroupKind.STATE:
        parts = " + ".join(
            f"{part.name} {part.units:,} × {part.unit_elements:,} × {part.element_bytes} B"
            for part in group.state
        )
        return f"{layers} × ({parts})"
    if group.entry_bytes is not None:
        time = f" ÷ {group.tokens_per_entry} tokens" if group.tokens_per_entry > 1 else ""
        return f"{layers} × {group.entry_bytes:,} B{time}"
    heads = (
        f"{layers} × {group.kv_heads} KV heads × " if group.kind is not GroupKind.LATENT else f"{layers} × "
    )
    if group.kind is GroupKind.INDEX:
        heads = f"{layers} × "
    text = heads + _vector(group, dtype)
    if group.kind is GroupKind.CROSS:
        known = f"{group.source_tokens:,}" if group.source_tokens else "each"
        text += f" × {known} {group.note or 'source tokens'}"
    return text


def _vector(group: LayerGroup, dtype: KVDtype) -> str:
    dims = f"({group.key_dim} + {group.value_dim})" if group.value_dim else f"{group.key_dim}"
    if dtype.note.startswith(f"{dtype.bits // 8} B per element") and "+" not in dtype.note:
        return f"{dims} × {dtype.bits // 8} B"
    if group.kind is GroupKind.LATENT:
        return f"{_plain(group.layer_token_bytes(dtype))} B [{dims} in {dtype.name}]"
    if not group.value_dim:
        return f"{_plain(dtype.key(group.key_dim))} B [{dtype.name}]"
    return f"({_plain(dtype.key(group.key_dim))} + {_plain(dtype.value(group.value_dim))}) B [{dtype.name}]"


def _plain(value: Fraction) -> str:
    return f"{int(value):,}" if value.denominator == 1 else f"{float(value):,.4f}".rstrip("0")


# --- The reverse question -------------------------------------------------------------------------------


def most_tokens(nbytes_of: Callable[[int], int], budget_bytes: int) -> int | None:
    """The longest sequence with `nbytes_of(tokens)` within budget; None where any length fits.

    A search, not a division: windows, states and blocks make the size anything but proportional.
    """
    if nbytes_of(TOKENS_MAX) <= budget_bytes:
        return None
    low, high = -1, TOKENS_MAX
    while high - low > 1:
        middle = (low + high) // 2
        if nbytes_of(middle) <= budget_bytes:
            low = middle
        else:
            high = middle
    return max(low, 0)


def fit_into(report: SizeReport, kv_bytes: int) -> Fit:
    """What fits into `kv_bytes` of KV memory on every rank."""

    def rank_bytes(tokens: int) -> int:
        return rank_sequence_bytes(report.stored, tokens, report.dtype, report.parallel)

    each = rank_bytes(report.tokens)
    sequences = max(0, kv_bytes) // each if each else BATCH_MAX
    return Fit(kv_bytes, min(sequences, BATCH_MAX), most_tokens(rank_bytes, max(0, kv_bytes)))


def weight_row(report: SizeReport, parameters: Parameters, fmt: WeightFormat) -> WeightRow:
    """Weights in `fmt`, and the KV that weighs as much."""
    nbytes = fmt.nbytes(parameters)
    exact = as_stored(report.geometry, Engine.EXACT, report.dtype)

    def grown(tokens: int) -> int:
        return _sequence_bytes(exact, tokens, report.dtype)

    longest = most_tokens(grown, nbytes)
    sequences = -(-nbytes // report.sequence_bytes) if report.sequence_bytes else BATCH_MAX
    return WeightRow(fmt, nbytes, sequences, None if longest is None else longest + 1)


# --- JSON -----------------------------------------------------------------------------------------------


def number(value: Fraction | int) -> int | float:
    """A JSON number: whole where it is whole."""
    return int(value) if Fraction(value).denominator == 1 else float(value)


def as_json(report: SizeReport) -> dict[str, Any]:
    """The seven keys of `tiercel size --json`; sizes in bytes, `total_bytes` one copy of all sequences."""
    share = report.share
    return {
        "bytes_per_token": number(report.bytes_per_token),
        "window_bytes_per_token": number(report.window_bytes_per_token),
        "window_tokens": report.window_tokens,
        "fixed_state_bytes": report.fixed_state_bytes,
        "total_bytes": report.total_bytes,
        "per_rank": {
            "bytes_per_token": number(share.bytes_per_token),
            "window_bytes_per_token": number(share.window_bytes_per_token),
            "fixed_state_bytes": share.fixed_state_bytes,
            "total_bytes": share.total_bytes,
            "ranks": share.ranks,
            "all_ranks_bytes": share.all_ranks_bytes,
            "distinct_shards": share.distinct_shards,
        },
        "groups": [_group_json(size) for size in report.groups],
    }


def _group_json(size: GroupSize) -> dict[str, Any]:
    group = size.group
    return {
        "kind": group.kind.value,
        "layers": len(group.layers),
        "kv_heads": group.kv_heads,
        "key_dim": group.key_dim,
        "value_dim": group.value_dim,
        "window_tokens": group.window_tokens,
        "bytes_per_token": number(size.bytes_per_token),
        "fixed_bytes": size.fixed_bytes,
        "sequence_bytes": size.sequence_bytes,
        "formula": size.formula,
    }


def weights_json(row: WeightRow, parameters: Parameters) -> dict[str, Any]:
    """The optional `weights` key."""
    return {
        "dtype": row.format.name,
        "parameters": parameters.total,
        "bytes": row.nbytes,
        "equal_sequences": row.sequences,
        "equal_tokens": row.tokens,
    }


def fit_json(fit: Fit) -> dict[str, Any]:
    """The optional `fit` key."""
    return {
        "kv_bytes_per_rank": fit.kv_bytes,
        "weights_bytes_per_rank": fit.weights_bytes,
        "sequences": fit.sequences,
        "tokens_of_one_sequence": fit.tokens,
    }
