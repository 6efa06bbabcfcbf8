"""What policies share that keep all KV elsewhere and fetch for every query what it seems to need.

The latest tokens are always read (half the budget at most); the rest of the budget goes to what scores
highest for the query, chosen per KV head. Nothing is dropped: another query finds everything again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.attention.digest import Digest
from tiercel.attention.higgs import Higgs, Packed
from tiercel.attention.policy import Bytes, LayerContext, newest, token_bytes, top

# As in the paper of the per-token landmarks; for all readers, so that they differ in what they are named for.
RECENT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Coded:
    """All keys and values of a layer in few bits, as they are kept elsewhere."""

    codec: Higgs
    keys: Packed
    values: Packed


@dataclass(frozen=True, slots=True)
class Reading:
    """Per query, the `count` best-scored tokens beside the recent ones.

    recent  bool [batch, kv_heads, tokens]; rest: the real others; count: [batch, kv_heads]
    coded   what is fetched of the others, of which `keys` and `values` hold what is left; None: exact KV
    """

    keys: Tensor
    values: Tensor
    recent: Tensor
    rest: Tensor
    count: Tensor
    digest: Digest
    bytes: Bytes
    coded: Coded | None = None

    def visible(self, queries: Tensor) -> Tensor:
        chosen = top(self.digest.score(queries), self.rest.unsqueeze(2), self.count.unsqueeze(2))
        return chosen | self.recent.unsqueeze(2)


def split_budget(context: LayerContext, budget: Tensor, recent_max: int) -> tuple[Tensor, Tensor, Tensor]:
    """(recent, rest, count): the latest tokens that are always read, the others, and how many of these may
    be.
    """
    recent_tokens = (budget // 2).clamp(max=recent_max)
    recent = newest(context.real, recent_tokens)
    return recent, context.real[:, None] & ~recent, budget - recent_tokens


def offloaded(
    context: LayerContext, budget: Tensor, recent: Tensor, index_bytes: float, share: float
) -> Bytes:
    """Everything on the host in `share` of its bytes; on the device an index, the recent tokens and what is
    read.
    """
    each = token_bytes(context)
    tokens = float(context.real.sum()) * context.keys.shape[1]
    recents = float(recent.sum())
    fetched = (float(budget.sum()) - recents) * each * share
    return Bytes(
        device=index_bytes + recents * each + fetched, host=(tokens - recents) * each * share, fetched=fetched
    )
