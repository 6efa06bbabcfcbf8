"""What transformers asks of a layer of its cache, answered for layers that keep their KV in their own way.

All of a sequence counts from position 0 and nothing of it is ever forgotten, so masks and positions follow
from its length. Where keys and values lie is for who derives from it.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class CountedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers has no types
    """A layer of `length` tokens, whose buffers are there before its first step."""

    # transformers sizes masks by the first sliding and the first full layer; all of ours are full length.
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, length: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types
        self.length = length
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length during this step, and the position of the first key."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens so far, whoever keeps them: positions go by them."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum (-1 in transformers' terms)."""
        return -1
