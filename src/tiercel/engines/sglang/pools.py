"""The host pools an engine registered, each with its layout and names: what a call of SGLang is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tiercel.blocks import Identity
from tiercel.engines.sglang.naming import Named, named
from tiercel.engines.sglang.pages import Pages, Run


@dataclass(slots=True)
class Pool:
    """One pool. `pages` and `identity` are None for one that only hands out indices."""

    dtype: torch.dtype
    pages: Pages | None
    identity: Identity | None
    _named: dict[int, Named] = field(default_factory=dict)

    def named(self, slot_bytes: int) -> Named | None:
        """The names of its pages in a store with such slots; None while the store was never reached."""
        if self.pages is None or self.identity is None or slot_bytes < 1:
            return None
        if (found := self._named.get(slot_bytes)) is None:
            found = self._named[slot_bytes] = named(self.identity, self.pages.nbytes, slot_bytes)
        return found

    def tags(self) -> list[bytes]:
        """The scopes used so far."""
        return [one.scope.tag for one in list(self._named.values())]

    def places(self, keys: Sequence[str], indices: Any) -> list[list[Run]] | None:
        """Where the pages of these host indices lie; None if they are not as many whole pages as keys."""
        pages = self.pages
        if pages is None or not isinstance(indices, torch.Tensor):
            return None
        if indices.numel() != len(keys) * pages.page_tokens:
            return None
        runs = [pages.runs(int(first)) for first in indices.reshape(-1)[:: pages.page_tokens].tolist()]
        return None if any(one is None for one in runs) else [one for one in runs if one is not None]
