"""A policy while an answer is really generated: what of the prompt stays on the device, and what each new
token fetches from host memory.

    served = Served(memory)
    served.take(layer, prepared)          # once per layer, at the end of the exact prefill
    served.keep_window(layer, ..., n)     # a layer with a sliding window of the model's own
    served.attend(call)                   # once per layer and new token, with that token's keys and values

What drops keeps the chosen tokens, per head as many as were chosen. What selects keeps its digest and the
latest tokens; the others lie in host memory, and the tokens that a step chooses pass through one buffer that
all layers use in turn. New tokens are kept exactly. One sequence, no padding. It is the same decision as when
an answer is judged (`running`): `prepared` decides, this only keeps less. It never changes what it is given,
and it keeps views of host memory, not copies: the owner leaves that as it is meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tiercel.attention.call import Call
from tiercel.attention.device import DeviceMemory, Lot
from tiercel.attention.digest import Digest
from tiercel.attention.higgs import Higgs, Packed
from tiercel.attention.numbers import attend_parts
from tiercel.attention.policy import Fixed, Prepared
from tiercel.attention.reading import Reading

# Room for new tokens comes in steps of this many, then half as many again.
_NEW_TOKENS = 64

Part = tuple[Tensor, Tensor]


class Context(Protocol):
    """What is kept of one layer's prompt."""

    def attend(self, call: Call, new: Part) -> Tensor:
        """Attention of one new token over what it may see of the prompt, and over `new`, the tokens since."""
        ...

    def make_room(self) -> None:
        """Take now what attending takes of the device, if that is anything."""
        return


class Served:
    """One sequence's KV under a policy.

    lot           what of the device's memory is used: all that stays there
    moved_bytes   from host to device since the beginning, for `steps` new tokens
    reads_host    whether exact keys and values in host memory are read on
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.lot = Lot(memory)
        self.moved_bytes = 0
        self.steps = 0
        self.reads_host = False
        self._contexts: dict[int, Context] = {}
        self._new: dict[int, NewTokens] = {}
        self._buffers: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}

    def take(self, layer: int, prepared: Prepared, host: Part | None = None) -> None:
        """Keep what the policy decided for `layer`. Raises RequestError where it does not fit the device.

        `host`: where keys and values [1, kv_heads, tokens, dim] lie in host memory, and will as long as they
        are read (None: what is fetched later is copied there).
        """
        if isinstance(prepared, Reading):
            where = _host_of(prepared, host)
            self.reads_host |= isinstance(where, ExactHost)
            self._keep(layer, Fetching(prepared, where, self), (prepared.keys, prepared.values))
        elif isinstance(prepared, Fixed):
            self._keep(layer, Kept(prepared, self.lot), (prepared.keys, prepared.values))
        else:
            raise TypeError(f"{type(prepared).__name__} has no form for serving")

    def keep_window(self, layer: int, keys: Tensor, values: Tensor, window: int) -> None:
        """Keep what a layer's own window of `window` tokens may still see of [1, kv_heads, tokens, dim]."""
        first = max(0, keys.shape[2] - (window - 1))
        part = (self.lot.put(keys[0, :, first:]), self.lot.put(values[0, :, first:]))
        self._keep(layer, Window(part, window), (keys, values))

    def _keep(self, layer: int, context: Context, like: Part) -> None:
        self._contexts[layer] = context
        self._new[layer] = NewTokens(self.lot, like)

    def make_room(self) -> None:
        """Make room for one new token in all layers. Raises RequestError where it does not fit the device."""
        for layer, new in self._new.items():
            self._contexts[layer].make_room()
            new.make_room()

    @torch.inference_mode()
    def attend(self, call: Call) -> Tensor:
        """Output [1, 1, heads, value_dim] of one new token, whose keys and values are kept from now on."""
        new = self._new[call.layer]
        new.append(call.keys[0], call.values[0])
        self.steps = max(self.steps, new.tokens)
        return self._contexts[call.layer].attend(call, new.part())

    def fetch(self, name: str, rows: Tensor, index: Tensor) -> Tensor:
        """Bring rows [kv_heads, n, …] of host memory, chosen per head by `index` [kv_heads, count], over.

        What comes back is valid until the next call with this name.
        """
        into = self.landing(name, rows, index.shape[1])
        where = index.to(rows.device)
        if into.device == rows.device:
            for head in range(rows.shape[0]):
                torch.index_select(rows[head], 0, where[head], out=into[head])
        else:
            into.copy_(torch.stack([rows[head][where[head]] for head in range(rows.shape[0])]))
        self.moved_bytes += into.nbytes
        return into

    def landing(self, name: str, rows: Tensor, count: int) -> Tensor:
        """The buffer of that name for `count` rows per head of [kv_heads, n, …]."""
        return self.buffer(name, (rows.shape[0], count, rows.shape[-1]), rows.dtype)

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The buffer of that name and shape, which layers use in turn."""
        known = (name, torch.Size(shape), dtype)
        if known not in self._buffers:
            self._buffers[known] = self.lot.empty(shape, dtype)
        return self._buffers[known]

    def close(self) -> None:
        """Let go of everything."""
        self._contexts.clear()
        self._new.clear()
        self._buffers.clear()
        self.lot.close()


class NewTokens:
    """Keys and values of the tokens since the prompt, exact, of one layer; room grows as they come.

    They have heads, dimensions and dtypes of `like`, both [1, kv_heads, n, dim].
    """

    def __init__(self, lot: Lot, like: Part) -> None:
        self._lot = lot
        self._kinds = [(one.shape[1], one.shape[3], one.dtype) for one in like]
        self._room: Part | None = None
        self.tokens = 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Keep [kv_heads, 1, dim] more."""
        assert keys.shape[1] == 1, "one new token at a time"
        room = self.make_room()
        for kept, one in zip(room, (keys, values), strict=True):
            kept[:, self.tokens].copy_(one[:, 0])
        self.tokens += 1

    def part(self) -> Part:
        """Those so far."""
        assert self._room is not None
        keys, values = self._room
        return keys[:, : self.tokens], values[:, : self.tokens]

    def make_room(self) -> Part:
        """Buffers with room for one more. Raises RequestError where it does not fit the device."""
        old = self._room
        if old is not None and self.tokens < old[0].shape[1]:
            return old
        tokens = self.tokens + max(_NEW_TOKENS, self.tokens // 2)
        keys, values = (self._lot.empty((heads, tokens, dim), dtype) for heads, dim, dtype in self._kinds)
        if old is not None:
            for bigger, kept in zip((keys, values), old, strict=True):
                bigger[:, : self.tokens].copy_(kept)
            self._lot.free(*old)
        self._room = (keys, values)
        return self._room


class Kept(Context):
    """A set of tokens per head; the rest is dropped. All heads' tokens lie one after the other."""

    def __init__(self, prepared: Fixed, lot: Lot) -> None:
        keep = prepared.keep[0].to(prepared.keys.device)
        self._counts = keep.sum(-1).tolist()
        self._keys, self._values = (lot.put(one[0][keep]) for one in (prepared.keys, prepared.values))

    def attend(self, call: Call, new: Part) -> Tensor:
        heads = len(self._counts)
        if len(set(self._counts)) == 1:
            part = tuple(one.view(heads, -1, one.shape[-1]) for one in (self._keys, self._values))
            return attend_parts(call.queries, [(part[0], part[1]), new], call.scale, call.softcap)
        outputs, first = [], 0
        for head, count in enumerate(self._counts):
            only = slice(head, head + 1)
            mine = (self._keys[None, first : first + count], self._values[None, first : first + count])
            since = (new[0][only], new[1][only])
            outputs.append(attend_parts(call.queries[:, only], [mine, since], call.scale, call.softcap))
            first += count
        return torch.cat(outputs, 2)


class Window(Context):
    """The end of the prompt that the model's own window still sees, and sees less of with every token."""

    def __init__(self, part: Part, window: int) -> None:
        self._part, self._window = part, window

    def attend(self, call: Call, new: Part) -> Tensor:
        keys, values = self._part
        gone = keys.shape[1] - max(0, self._window - new[0].shape[1])
        seen = keys[:, max(0, gone) :], values[:, max(0, gone) :]
        since = new[0][:, -self._window :], new[1][:, -self._window :]
        return attend_parts(call.queries, [seen, since], call.scale, call.softcap)


class Host(Protocol):
    """Keys and values [kv_heads, n, …] in host memory."""

    def fetch(self, index: Tensor, served: Served) -> Part: ...

    def make_room(self, count: int, served: Served) -> None: ...


@dataclass(frozen=True, slots=True)
class ExactHost:
    """They lie there as they are."""

    keys: Tensor
    values: Tensor

    def fetch(self, index: Tensor, served: Served) -> Part:
        """Bring the tokens `index` [kv_heads, count] over."""
        return served.fetch("keys", self.keys, index), served.fetch("values", self.values, index)

    def make_room(self, count: int, served: Served) -> None:
        """Take the buffers that `count` tokens per head pass through."""
        served.landing("keys", self.keys, count)
        served.landing("values", self.values, count)


@dataclass(frozen=True, slots=True)
class CodedHost:
    """They lie there in few bits, are moved so, and decoded on the device to `dtype`."""

    codec: Higgs
    keys: Packed
    values: Packed
    dtype: torch.dtype

    def fetch(self, index: Tensor, served: Served) -> Part:
        """Bring the tokens `index` [kv_heads, count] over."""
        return self._one("keys", self.keys, index, served), self._one("values", self.values, index, served)

    def _one(self, name: str, packed: Packed, index: Tensor, served: Served) -> Tensor:
        codes = served.fetch(f"{name} codes", packed.codes[0], index)
        lengths = served.fetch(f"{name} lengths", packed.lengths[0], index)
        into = self._decoded(name, packed, index.shape[1], served)
        return into.copy_(self.codec.unpack(Packed(codes, lengths, packed.dim)))

    def make_room(self, count: int, served: Served) -> None:
        """Take the buffers that `count` tokens per head pass through."""
        for name, packed in (("keys", self.keys), ("values", self.values)):
            served.landing(f"{name} codes", packed.codes[0], count)
            served.landing(f"{name} lengths", packed.lengths[0], count)
            self._decoded(name, packed, count, served)

    def _decoded(self, name: str, packed: Packed, count: int, served: Served) -> Tensor:
        return served.buffer(name, (packed.codes.shape[1], count, packed.dim), self.dtype)


class Fetching(Context):
    """A digest and the latest tokens on the device; the others in host memory, some fetched per step."""

    def __init__(self, prepared: Reading, host: Host, served: Served) -> None:
        lot, tokens = served.lot, prepared.keys.shape[2]
        recents, counts = prepared.recent[0].sum(-1), prepared.count[0]
        assert int(recents.min()) == int(recents.max()), "heads differ in their budget"
        self._count, self._rest = int(counts.max()), tokens - int(recents.max())
        self._digest: Digest = prepared.digest.placed(lot.put)
        self._recent: Part = (
            lot.put(prepared.keys[0, :, self._rest :]), lot.put(prepared.values[0, :, self._rest :])
        )  # fmt: skip
        self._host, self._served = host, served

    def attend(self, call: Call, new: Part) -> Tensor:
        scores = self._digest.score(call.queries)[0, :, 0]
        scores[:, self._rest :] = -torch.inf
        index = scores.topk(self._count, dim=-1).indices
        chosen = self._host.fetch(index, self._served)
        return attend_parts(call.queries, [chosen, self._recent, new], call.scale, call.softcap)

    def make_room(self) -> None:
        """Take the buffers that chosen tokens pass through."""
        self._host.make_room(self._count, self._served)


def _host_of(prepared: Reading, host: Part | None) -> Host:
    if (coded := prepared.coded) is None:
        keys, values = (prepared.keys, prepared.values) if host is None else host
        return ExactHost(keys[0].cpu(), values[0].cpu())
    packed = [Packed(one.codes.cpu(), one.lengths.cpu(), one.dim) for one in (coded.keys, coded.values)]
    return CodedHost(coded.codec, packed[0], packed[1], prepared.keys.dtype)
