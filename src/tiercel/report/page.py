"""A report's page: the head that all have, and how it was measured. It loads and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(title: str, style: str, body: str) -> str:
    """The page's text. The title is escaped here; style and body are HTML already."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def how_section(lines: Iterable[tuple[str, str]]) -> str:
    """How it was measured, as names and words."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines)
    return f'<section class="wide"><h2>How it was measured</h2><dl class="how">{rows}</dl></section>'
