"""A layer's attention in one step, of one sequence or of several, whose KV lies in host memory.

    prefill (several new tokens)   pieces on a fixed grid: those that stay on the device from there, others
                                   streamed; then the new tokens themselves
    decoding (one new token)       what stays on the device there; the rest where it lies, in host memory: the
                                   queries of all rows go there at once, and a few numbers come back at once

It changes nothing of what it attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tiercel.engines.transformers.offload.partial import Asking, Partial, attend, merged

if TYPE_CHECKING:
    from tiercel.engines.transformers.offload.cache import OffloadedCache


@dataclass(frozen=True, slots=True)
class Row:
    """What the new tokens of a sequence ask of layer `layer` of `cache`, which holds them by now.

    `keys` and `values` [kv_heads, new, dim] are their own.
    """

    cache: OffloadedCache
    layer: int
    asking: Asking
    keys: Tensor
    values: Tensor


def attended(rows: Sequence[Row], *, streamed: bool) -> list[Partial]:
    """Attention of each row, to all before its new tokens by parts and to these: of one layer, all alike."""
    before = [_streamed(row) for row in rows] if streamed else _where_they_lie(rows)
    return [
        merged(one, attend(row.asking, row.keys, row.values, row.asking.first))
        for row, one in zip(rows, before, strict=True)
    ]


def _streamed(row: Row) -> Partial | None:
    shared, share = row.cache.shared, row.cache.share()
    whole: Partial | None = None
    for piece in row.cache.pieces(row.layer, row.asking.first):
        if shared.stays(piece):
            keys, values = share.bring(piece.layer, piece.stop, row.cache.host(piece.layer))
            keys, values = keys[:, piece.start :], values[:, piece.start :]
        else:
            arrived, keys, values = shared.stream.take()
            assert arrived == piece, (arrived, piece)
        whole = merged(whole, attend(row.asking, keys, values, piece.start))
    return whole


def _where_they_lie(rows: Sequence[Row]) -> list[Partial | None]:
    device = rows[0].keys.device
    cuts = [row.cache.stays_until(row.layer, row.asking) for row in rows]
    far = [at for at, row in enumerate(rows) if cuts[at] < row.asking.first]
    # Queries leave first: so the device computes its part while the host does.
    queries = _moved([rows[at].asking.rows for at in far], torch.device("cpu"))
    whole = [_on_device(row, cut) for row, cut in zip(rows, cuts, strict=True)]
    parts = [_in_host_memory(rows[at], cuts[at], asked) for at, asked in zip(far, queries, strict=True)]
    for at, part in zip(far, _brought(parts, device), strict=True):
        whole[at] = merged(whole[at], part)
    return whole


def _on_device(row: Row, stop: int) -> Partial | None:
    start = row.asking.seen_from
    if start == stop:
        return None
    keys, values = row.cache.share().bring(row.layer, stop, row.cache.host(row.layer))
    return attend(row.asking, keys[:, start:], values[:, start:], start)


def _in_host_memory(row: Row, start: int, queries: Tensor) -> Partial:
    keys, values = (whole[:, start : row.asking.first] for whole in row.cache.host(row.layer))
    return attend(replace(row.asking, rows=queries), keys, values, start)


def _moved(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The same on `device`, moved as one; to the host that waits for all that was queued before."""
    if not tensors or tensors[0].device == device:
        return tensors
    return list(torch.stack(list(tensors)).to(device))


def _brought(parts: Sequence[Partial], device: torch.device) -> Sequence[Partial]:
    if device.type == "cpu":
        return parts
    return [unpacked(one) for one in _moved([packed(one) for one in parts], device)]


def packed(part: Partial) -> Tensor:
    """A part as one tensor, [kv_heads, rows, value_dim + 2]."""
    return torch.cat((part.total, part.weight, part.peak), -1)


def unpacked(packed: Tensor) -> Partial:
    """What `packed` was made of."""
    return Partial(packed[..., :-2], packed[..., -2:-1], packed[..., -1:])
