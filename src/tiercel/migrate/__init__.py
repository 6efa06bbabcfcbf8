"""From LMCache's settings, or vLLM's own offloading flags, to a `tiercel.toml`; what became of each option.

Reads texts and mappings that it is given; opens no tier, asks no server, writes no file.
"""

from __future__ import annotations

from tiercel.migrate.draft import Draft, Fate, Note
from tiercel.migrate.given import Given
from tiercel.migrate.lmcache import from_environ, from_yaml, translate
from tiercel.migrate.words import translate_words

__all__ = [
    "Draft",
    "Fate",
    "Given",
    "Note",
    "from_environ",
    "from_yaml",
    "translate",
    "translate_words",
]
