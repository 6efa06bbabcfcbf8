"""What each rank holds when a model is split by tensor, pipeline and context parallelism.

KV heads are divided among `tp` ranks and copied where there are fewer heads than ranks; MLA latents and
selector keys are copied on every rank; layers are divided among `pp` stages; `cp` ranks divide the tokens
of layers that keep them all, and copy windows and recurrent states. Nothing here knows an allocator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from tiercel.errors import ConfigError
from tiercel.geometry import GroupKind, KVDtype, KVGeometry, LayerGroup
from tiercel.geometry.engines import Stored

RANKS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Parallel:
    """Widths of tensor, pipeline and context parallelism; `ranks` GPUs in all."""

    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        """GPUs in all: every width is an axis of its own."""
        return self.tp * self.pp * self.cp


@dataclass(frozen=True, slots=True)
class RankShare:
    """What the fullest rank holds, and what all ranks hold together.

    Token sizes are bytes per token of the sequence, maybe fractions; `total_bytes` and `all_ranks_bytes`
    are for the tokens and sequences asked about. `distinct_shards` counts the different pieces that one
    block of tokens falls into: a store that keeps one copy of each keeps the whole.
    """

    bytes_per_token: Fraction
    window_bytes_per_token: Fraction
    fixed_state_bytes: int
    total_bytes: int
    ranks: int
    all_ranks_bytes: int
    distinct_shards: int
    stage_layers: tuple[int, ...]


def check_parallel(geometry: KVGeometry, parallel: Parallel) -> None:
    """Raise ConfigError, one line, where the widths do not fit the model."""
    for name, width in (("--tp", parallel.tp), ("--pp", parallel.pp), ("--cp", parallel.cp)):
        if not 1 <= width <= RANKS_MAX:
            raise ConfigError(f"{name}: {width}; accepted: a whole number from 1 to {RANKS_MAX}")
    if parallel.pp > geometry.num_layers:
        raise ConfigError(
            f"--pp: {parallel.pp}; accepted: at most the {geometry.num_layers} layers of the model"
        )
    for group in geometry.groups:
        heads = 0 if group.replicated else group.kv_heads
        if heads and heads % parallel.tp and parallel.tp % heads:
            raise ConfigError(
                f"--tp: {parallel.tp}; accepted: a divisor or a multiple of the {heads} KV heads "
                f"({group.kind.value} layers)"
            )


def stage_sizes(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage: equal, with the rest given to the stages before the last one.

    The last stage also has the output head and the first one the embedding, so they get theirs last.
    """
    sizes = [num_layers // pp] * pp
    for extra in range(num_layers % pp):
        sizes[-(extra + 2) % pp] += 1
    return tuple(sizes)


def _stage_groups(geometry: KVGeometry, pp: int) -> list[tuple[LayerGroup, ...]]:
    if pp == 1:
        return [geometry.groups]
    stages, first = [], 0
    for size in stage_sizes(geometry.num_layers, pp):
        inside = range(first, first + size)
        kept = (replace(g, layers=tuple(i for i in g.layers if i in inside)) for g in geometry.groups)
        stages.append(tuple(group for group in kept if group.layers))
        first += size
    return stages


def _shared_by_tokens(group: LayerGroup) -> bool:
    return group.per_token and group.window_tokens is None


def group_bytes_on_rank(
    stored: Stored, group: LayerGroup, tokens: int, dtype: KVDtype, parallel: Parallel
) -> Fraction:
    """Bytes of `group` for one sequence of `tokens` on one rank of its stage."""
    held = -(-tokens // parallel.cp) if _shared_by_tokens(group) else tokens
    return stored.group_bytes(group, held, dtype, parallel.tp)


def rank_sequence_bytes(stored: Stored, tokens: int, dtype: KVDtype, parallel: Parallel) -> int:
    """Bytes of one sequence of `tokens` on the fullest rank."""
    return max(
        _whole(sum((group_bytes_on_rank(stored, g, tokens, dtype, parallel) for g in groups), Fraction(0)))
        for groups in _stage_groups(stored.geometry, parallel.pp)
    )


def rank_share(stored: Stored, tokens: int, batch: int, dtype: KVDtype, parallel: Parallel) -> RankShare:
    """The share of the fullest rank for `batch` sequences of `tokens`. Raises ConfigError (bad widths)."""
    check_parallel(stored.geometry, parallel)
    stages = _stage_groups(stored.geometry, parallel.pp)
    totals = [
        _whole(sum((group_bytes_on_rank(stored, g, tokens, dtype, parallel) for g in groups), Fraction(0)))
        for groups in stages
    ]
    fullest = stages[totals.index(max(totals))]
    tp = parallel.tp
    grows = [group for group in fullest if _shared_by_tokens(group)]
    capped = [group for group in fullest if group.per_token and group.window_tokens is not None]
    return RankShare(
        bytes_per_token=sum((g.token_bytes(dtype, tp) for g in grows), Fraction(0)) / parallel.cp,
        window_bytes_per_token=sum((g.token_bytes(dtype, tp) for g in capped), Fraction(0)),
        fixed_state_bytes=sum(g.fixed_bytes(dtype, tp) for g in fullest if not g.per_token),
        total_bytes=max(totals) * batch,
        ranks=parallel.ranks,
        all_ranks_bytes=sum(totals) * batch * tp * parallel.cp,
        distinct_shards=distinct_shards(stored.geometry, parallel),
        stage_layers=stage_sizes(stored.geometry.num_layers, parallel.pp),
    )


def distinct_shards(geometry: KVGeometry, parallel: Parallel) -> int:
    """Different pieces of one block over all ranks: copies of the same heads or latents count once."""
    widths = [
        _tp_shards(group, parallel.tp) for group in geometry.groups if group.kind is not GroupKind.SHARED
    ]
    tokens = parallel.cp if any(_shared_by_tokens(group) for group in geometry.groups) else 1
    return max(widths, default=1) * parallel.pp * tokens


def _tp_shards(group: LayerGroup, tp: int) -> int:
    if group.replicated:
        return 1
    if group.kind is GroupKind.STATE:
        return min(tp, max((part.units for part in group.state), default=1))
    return min(tp, max(1, group.kv_heads))


def _whole(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)
