"""Whose blocks a store holds, in words: what the scopes seen lately are called.

A key begins with its scope's tag, which says nothing to people; the chains of leases say which model, adapter
and tenant it is. Of a tenant's salt only a short digest is ever known here.

Locking: none here; the store's lock protects it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass

from tiercel.blocks import TAG_BYTES, BlockKey, Chain

_SCOPES_MAX = 4096
_BEGINNINGS_MAX = 4096
_LABEL_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class ScopeLabel:
    """A scope in words, each empty where nothing is known: before it was used, or without adapter or salt.

    Blocks that may come back nearly equal are those of a `model (codec)`.
    """

    model: str = ""
    adapter: str = ""
    salt: str = ""


class Scopes:
    """Root and description by tag, of the scopes used last, and the blocks that prompts began with lately."""

    def __init__(self) -> None:
        self._beginnings: OrderedDict[BlockKey, None] = OrderedDict()
        self._known: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()

    def note(self, chain: Chain) -> None:
        """A chain of this scope is used."""
        if chain.keys:
            self._beginnings[chain.keys[0]] = None
            self._beginnings.move_to_end(chain.keys[0])
            if len(self._beginnings) > _BEGINNINGS_MAX:
                self._beginnings.popitem(last=False)
        tag = chain.root[:TAG_BYTES]
        if tag in self._known:
            self._known.move_to_end(tag)
            return
        self._known[tag] = (chain.root, chain.info)
        if len(self._known) > _SCOPES_MAX:
            self._known.popitem(last=False)

    def get(self, tag: bytes) -> tuple[bytes, bytes] | None:
        """Root and description of a scope, as its chains have them."""
        return self._known.get(tag)

    def begins(self, key: BlockKey) -> bool:
        """Whether a prompt used lately began with this block."""
        return key in self._beginnings


def label_of(info: bytes) -> ScopeLabel:
    """A scope's description as a chain carries it, in words."""
    try:
        told = json.loads(info)
    except ValueError:
        return ScopeLabel()
    if not isinstance(told, dict):
        return ScopeLabel()
    if isinstance(lossy := told.get("lossy"), str):
        told["model"] = f"{told.get('model', '')} ({lossy.partition(' ')[0]})"
    return ScopeLabel(*(str(told.get(name, ""))[:_LABEL_CHARS_MAX] for name in ("model", "adapter", "salt")))
