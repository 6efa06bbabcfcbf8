"""stdout for people: wide enough for tables, and a name from outside is never more than one line."""

from __future__ import annotations

from rich.console import Console

_PLAIN_WIDTH = 132


def make_console() -> Console:
    """stdout, wide enough for a table where no terminal says how wide it is."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def one_line(text: str) -> str:
    """`text` without line breaks and control characters, which a file's name may hold."""
    return "".join(char if char.isprintable() else " " for char in text)
