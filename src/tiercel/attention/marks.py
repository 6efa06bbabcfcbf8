"""Which tokens of a prompt are special, and which are punctuation: what FastGen treats by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def marks_of(tokenizer: Any, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(special, punctuation), each bool [1, tokens]. A token without a letter or digit is punctuation."""
    special = set(tokenizer.all_special_ids)
    marks = {one for one in set(tokens) if one not in special and _is_mark(tokenizer, one)}
    first, second = (torch.tensor([[one in kind for one in tokens]]) for kind in (special, marks))
    return first, second


def _is_mark(tokenizer: Any, token: int) -> bool:
    text = tokenizer.decode([token]).strip()
    return bool(text) and not any(character.isalnum() for character in text)
