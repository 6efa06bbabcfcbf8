"""The pictures of docs/concepts.md, drawn by hand as SVG.

Each has its own ground, so it reads on light and dark pages.
`python -m scripts.docs_pages` writes them. Nothing here is measured: figures come from `make bench`.
"""

# ruff: noqa: E501 (the texts of pictures stay whole)

from __future__ import annotations

from collections.abc import Callable
from html import escape

WIDTH = 760
_STYLE = """\
:root{--ground:#fbfcfd;--edge:#d5dbe3;--ink:#1b2430;--soft:#5a6676;--line:#8492a3;--plain:#fff;
--warm:#fff1dc;--warm-edge:#d99a3a;--cool:#e0f1ef;--cool-edge:#2f8f83;--cold:#e6ecfa;--cold-edge:#5b7bc4}
@media (prefers-color-scheme:dark){:root{--ground:#161b22;--edge:#343d49;--ink:#e8edf3;--soft:#a3afbd;--line:#7d8a9a;
--plain:#1f2630;--warm:#3a2d17;--warm-edge:#c58f3d;--cool:#14322f;--cool-edge:#46a598;--cold:#1d2a47;--cold-edge:#7d98dc}}
text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;fill:var(--ink)}
.soft{font-size:12px;fill:var(--soft)}.head{font-weight:600}.number{font-size:12px;font-weight:600}
.plain{fill:var(--plain);stroke:var(--line)}.warm{fill:var(--warm);stroke:var(--warm-edge)}
.cool{fill:var(--cool);stroke:var(--cool-edge)}.cold{fill:var(--cold);stroke:var(--cold-edge)}
.gone{fill:none;stroke:var(--line);stroke-dasharray:5 4}.way{fill:none;stroke:var(--line);stroke-width:1.6}
.tip{fill:var(--line)}.zoom{fill:var(--cool);opacity:.8}.dot{fill:var(--ground);stroke:var(--line)}"""


def _text(x: float, y: float, text: str, look: str = "", anchor: str = "middle") -> str:
    look = f' class="{look}"' if look else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{look}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, look: str, *lines: str) -> str:
    """A box with its first line in bold and the others small, in its middle."""
    drawn = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{look}"/>']
    first = y + height / 2 + 5 - (len(lines) - 1) * 8.5
    for i, line in enumerate(lines):
        drawn.append(_text(x + width / 2, first + 17 * i, line, "soft" if i else "head"))
    return "".join(drawn)


def _way(*points: tuple[float, float], both: bool = False) -> str:
    """A line through the points with an arrow's tip at its end, or at both."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    start = ' marker-start="url(#tip)"' if both else ""
    return f'<polyline points="{path}" class="way" marker-end="url(#tip)"{start}/>'


def _number(x: float, y: float, number: int) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="10" class="dot"/>' + _text(x, y + 4.3, str(number), "number")


def _picture(height: float, title: str, *parts: str) -> str:
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" class="tip"/></marker>'
    )
    ground = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:g}" rx="10" style="fill:var(--ground);stroke:var(--edge)"/>'
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE}\n</style>\n<defs>{tip}</defs>\n{ground}\n{body}\n</svg>\n"
    )


def block() -> str:
    """A prompt cut into blocks, their keys, and one block as a record."""
    left, wide, step = 24, 142, 154
    parts = [_text(left, 32, "A prompt of 1,100 tokens, in blocks of 256", "head", "start")]
    for i in range(4):
        x = left + step * i
        parts += [
            _box(x, 46, wide, 50, "cool", f"block {i}", f"tokens {256 * i:,} – {256 * i + 255:,}"),
            _way((x + wide / 2, 96), (x + wide / 2, 126)),
            _box(x, 128, wide, 34, "plain", f"key {i}"),
            _way((x - step + wide, 145), (x - 2, 145)) if i else "",
        ]
    x = left + step * 4
    parts += [
        _box(x, 46, WIDTH - x - 24, 50, "gone", "rest", "76 tokens"),
        _text((x + WIDTH - 24) / 2, 138, "no key:", "soft"),
        _text((x + WIDTH - 24) / 2, 154, "computed", "soft"),
        _text(
            left,
            186,
            "A key is a hash of the key before and the block's tokens: it names the prompt up to there.",
            "soft",
            "start",
        ),
        f'<polygon points="{left + step:g},208 {left + step + wide:g},208 {WIDTH - 24},236 {left},236" class="zoom"/>',
    ]
    cells = (("header", "4 KiB", 128), ("layer 0", "keys, values", 116), ("layer 1", "keys, values", 116),
             ("…", "", 60), ("last layer", "keys, values", 116), ("rest", "to a full page", 0))  # fmt: skip
    at, right = float(left), WIDTH - 24.0
    for name, what, cell in cells:
        width = cell or right - at
        look = {"header": "warm", "rest": "gone"}.get(name, "plain")
        parts.append(_box(at, 238, width, 50, look, *(line for line in (name, what) if line)))
        at += width
    parts += [
        _text(left, 314, "header: key, whose it is (model, weights, dtype, layout, adapter, salt's digest), checksum of all bytes", "soft", "start"),
        _text(left, 334, "One run of bytes, the same in a slot of RAM, a file, an object of S3 or a value of Valkey: a record.", "soft", "start"),
    ]  # fmt: skip
    return _picture(352, "Blocks, keys and a record", *parts)


def tiers() -> str:
    """From the engine's memory down to what hosts share."""
    rows = (
        ("warm", 250, "GPU memory", "the engine's own cache", "until it needs the room"),
        ("cool", 350, "RAM", "fixed slots, one record each", "while process or daemon lives"),
        ("cold", 450, "disk", "one file per block", "through restarts and crashes"),
        ("cold", 550, "Valkey · S3 · Mooncake · shared directory", "what other hosts computed, too", "beyond the host"),
    )  # fmt: skip
    middle, parts = 300.0, [_text(WIDTH - 24, 32, "how long it keeps", "soft", "end")]
    for i, (look, width, name, what, outlives) in enumerate(rows):
        y = 46 + 78 * i
        parts.append(_box(middle - width / 2, y, width, 54, look, name, what))
        parts.append(_text(WIDTH - 24, y + 32, outlives, "soft", "end"))
        if i:
            parts.append(_way((middle - 60, y - 23), (middle - 60, y - 2)))
            parts.append(_way((middle + 60, y - 2), (middle + 60, y - 23)))
    parts += [
        _text(middle - 70, 117, "stored", "soft", "end"),
        _text(middle + 70, 117, "loaded", "soft", "start"),
        _text(24, 374, "Larger and slower from top to bottom. Each has a cap, a queue, a deadline and a breaker of its own.", "soft", "start"),
    ]  # fmt: skip
    return _picture(392, "Tiers", *parts)


def lease() -> str:
    """What becomes of a slot, and what a lease holds."""
    y, parts = 60, [_text(24, 32, "A slot of the arena", "head", "start")]
    for x, look, name, what in (
        (24, "gone", "free", ""),
        (214, "warm", "being filled", "nobody can see it"),
        (424, "cool", "published", "lookups find it"),
        (624, "plain", "evicted", ""),
    ):
        parts.append(
            _box(x, y, 112 if look in ("gone", "plain") else 140, 54, look, *filter(None, (name, what)))
        )
    parts += [
        _way((136, 87), (212, 87)),
        _text(174, 79, "store lease", "soft"),
        _text(174, 104, "or a load", "soft"),
        _way((354, 87), (422, 87)),
        _text(388, 79, "checksum", "soft"),
        _way((564, 87), (622, 87)),
        _text(593, 79, "coldest", "soft"),
        _way((680, 60), (680, 44), (80, 44), (80, 58)),
        _box(404, 186, 180, 66, "cool", "held", "by one or many read leases,", "or by a pin"),
        _way((470, 116), (470, 184)),
        _way((518, 184), (518, 116)),
        _text(462, 154, "a reader asks", "soft", "end"),
        _text(526, 154, "the last one is done", "soft", "start"),
        _text(24, 194, "What is held is never evicted or overwritten.", "soft", "start"),
        _text(24, 214, "A lease hands out one block at a time, so a prompt", "soft", "start"),
        _text(24, 234, "larger than RAM passes through it.", "soft", "start"),
        _text(24, 254, "It ends with its deadline, or with its process.", "soft", "start"),
    ]
    return _picture(274, "A slot and its leases", *parts)


def way() -> str:
    """A byte's way down and up, by the numbers of docs/architecture.md."""
    bands = ((46, "warm", "engine"), (156, "cool", "RAM"), (266, "cold", "tiers"))
    parts = [
        _text(226, 30, "down: after a prefill", "head"),
        _text(578, 30, "up: before a prefill", "head"),
    ]
    for y, look, name in bands:
        parts.append(f'<rect x="24" y="{y}" width="{WIDTH - 48}" height="62" rx="6" class="{look}"/>')
        parts.append(_text(36, y + 36, name, "head", "start"))
    steps = (
        (110, 72, 1, "prefill emits the first token;", "storing waits for nobody"),
        (110, 182, 3, "the block is published with its", "checksum; lookups find it now"),
        (110, 292, 4, "written in the background,", "within the tier's cap"),
        (440, 182, 1, "lookup in memory, then load or", "compute, by what was measured"),
        (440, 292, 2, "read ahead of the reader,", "a few blocks at a time"),
        (440, 72, 4, "copied into the engine's cache;", "the rest is computed"),
    )
    for x, y, number, first, second in steps:
        parts += [_number(x, y + 5, number), _text(x + 18, y + 1, first, "soft", "start"), _text(x + 18, y + 18, second, "soft", "start")]  # fmt: skip
    parts += [
        _way((180, 108), (180, 154)),
        _number(204, 131, 2),
        _text(220, 135, "into a free slot, one copy", "soft", "start"),
        _way((180, 218), (180, 264)),
        _text(196, 246, "one direct write from the slot", "soft", "start"),
        _way((520, 264), (520, 220)),
        _number(544, 241, 3),
        _text(560, 245, "verified, every byte", "soft", "start"),
        _way((520, 154), (520, 110)),
        _text(536, 136, "block by block", "soft", "start"),
        _text(24, 354, "Late or broken on the way up: it is computed. Broken on the way down: it is not kept. Both are counted.", "soft", "start"),
    ]  # fmt: skip
    return _picture(372, "A byte's way down and up", *parts)


PICTURES: dict[str, Callable[[], str]] = {
    "concept-block": block,
    "concept-tiers": tiers,
    "concept-lease": lease,
    "concept-way": way,
}
