"""The timeline of a run as inline SVG: a lane per conversation, what it did when, and the restart.

Drawn to scale but for one thing: nothing is narrower than a few pixels, or a restore could not be seen.
"""

from __future__ import annotations

from html import escape

from tiercel.demo.outcome import Gap, Outcome, Span, Turn

WIDTH, LEFT, RIGHT = 1000, 12, 20
TOP, LANE, BAR = 30, 62, 18
SPAN_WIDTH_MIN = 3.0
_FLAG_GAP, _FLAG_RISE = 8, 14
_FLAG_CHARACTER = 7.0  # a generous width of one, in the units of the drawing

# Kind, its words in the legend. The colours are in the page's style, so that both themes have their own.
LEGEND = (
    ("prefill", "prefill (reading)"),
    ("ram", "restored from RAM"),
    ("disk", "restored from disk"),
    ("answer", "answer"),
    ("store", "storing"),
    ("compare", "recomputed, only to compare"),
    ("idle", "idle: nothing held by the model"),
)


def timeline_svg(outcome: Outcome) -> str:
    """Return the `<svg>` element; empty when nothing ran."""
    ends = [span.end_s for span in outcome.spans] + [gap.end_s for gap in outcome.gaps]
    if not ends:
        return ""
    scale = _Scale(max(ends))
    lanes = len(outcome.conversations)
    bottom = TOP + lanes * LANE
    parts = [_grid(scale, bottom)]
    parts += [_gap(gap, scale, bottom) for gap in outcome.gaps]
    for lane, name in enumerate(outcome.conversations):
        spans = [span for span in outcome.spans if span.lane == lane]
        parts.append(_lane(lane, name, spans, scale))
        resumed = [turn for turn in outcome.turns if turn.lane == lane and turn.number > 1]
        parts.append(_flags(resumed, spans, scale))
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {bottom + 44}" role="img" '
        f'aria-label="Timeline of {lanes} conversations over {max(ends):.0f} seconds">'
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="hatch-ground" width="6" height="6"/>'
        '<rect class="hatch-line" width="2.4" height="6"/></pattern></defs>'
        f"{''.join(parts)}</svg>"
    )


class _Scale:
    """Seconds to x."""

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s

    def x(self, at_s: float) -> float:
        return LEFT + at_s / self.end_s * (WIDTH - LEFT - RIGHT)

    def step_s(self) -> float:
        """A round number of seconds that gives about ten ticks."""
        rough = self.end_s / 10
        magnitude = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 0.1
        return next((magnitude * one for one in (1, 2, 5, 10) if magnitude * one >= rough), magnitude * 10)


def _grid(scale: _Scale, bottom: int) -> str:
    parts, step_s = [], scale.step_s()
    for tick in range(int(scale.end_s / step_s) + 1):
        x = scale.x(tick * step_s)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
        parts.append(
            f'<text class="soft" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick * step_s:g}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="soft" x="{middle:g}" y="{bottom + 36}" text-anchor="middle">'
        "seconds since the first prompt</text>"
    )
    return "".join(parts)


def _gap(gap: Gap, scale: _Scale, bottom: int) -> str:
    x, end = scale.x(gap.start_s), scale.x(gap.end_s)
    width = max(end - x, 1.5)
    label = ""
    if gap.kind == "restart":
        label = f'<text class="soft" x="{x + width / 2:.1f}" y="14" text-anchor="middle">restart</text>'
    return (
        f'<g><title>{escape(gap.title)}</title><rect class="gap {gap.kind}" x="{x:.1f}" y="{TOP - 8}" '
        f'width="{width:.1f}" height="{bottom - TOP + 8}"/>{label}</g>'
    )


def _lane(lane: int, name: str, spans: list[Span], scale: _Scale) -> str:
    top = TOP + lane * LANE
    y = top + LANE - BAR - 12
    parts = [f'<text class="name" x="{LEFT}" y="{top + 12}">{escape(name)}</text>']
    if spans:
        start, end = scale.x(spans[0].start_s), scale.x(spans[-1].end_s)
        parts.append(
            f'<line class="idle" x1="{start:.1f}" x2="{end:.1f}" y1="{y + BAR / 2:g}" y2="{y + BAR / 2:g}"/>'
        )
    # Restores last, so that what follows them never hides the little there is to see.
    for span in sorted(spans, key=lambda span: span.kind in ("ram", "disk")):
        x, width = scale.x(span.start_s), scale.x(span.end_s) - scale.x(span.start_s)
        parts.append(
            f'<rect class="{span.kind}" x="{x:.1f}" y="{y:g}" width="{max(width, SPAN_WIDTH_MIN):.1f}" '
            f'height="{BAR}"><title>{escape(span.title)}</title></rect>'
        )
    return "".join(parts)


def _flags(turns: list[Turn], spans: list[Span], scale: _Scale) -> str:
    """A word above the beginning of each resumed turn: where it came from and its time to first token."""
    parts, taken_x = [], 0.0
    for turn in turns:
        begun = [s for s in spans if s.kind in ("ram", "disk", "prefill") and s.turn == turn.number]
        if not begun:
            continue
        x = scale.x(begun[0].start_s)
        y = TOP + turn.lane * LANE + LANE - BAR - 12
        text = f"{turn.source_text()} {turn.ttft_s:.2f} s"
        width = len(text) * _FLAG_CHARACTER + _FLAG_GAP
        anchor, shift, left = ("start", _FLAG_GAP / 2, x)
        if x + width > WIDTH:
            anchor, shift, left = ("end", -_FLAG_GAP / 2, x - width)
        # A word that would lie on the one before it moves up a line.
        rise = _FLAG_RISE if left < taken_x else 0
        taken_x = max(taken_x, left + width)
        parts.append(
            f'<line class="{turn.source} pole" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 14 - rise:g}" '
            f'y2="{y + BAR:g}"/>'
            f'<text class="flag" x="{x + shift:.1f}" y="{y - 5 - rise:g}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )
    return "".join(parts)
