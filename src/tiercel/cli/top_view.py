"""An overview as lines for a terminal of any size: tiers as bars, rates, hits, seconds, prefixes, faults.

Pure: takes what was told now and a moment before, returns lines no longer and no more than asked. What comes
from engines or records is shown as text, never as markup or control characters.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tiercel.config import human_bytes

Told = Mapping[str, Any]

_NAME, _SIZE, _BLOCKS, _RATE = 9, 21, 10, 12
_BAR = (10, 40)
# Of the lines that are left below the tiers: what is shown first, and at least.
_LEAST_ROWS = 2


def lines(told: Told, before: Told | None, width: int, height: int | None = None) -> list[Text]:
    """The picture, at most `width` wide and `height` high (None: as high as it gets).

    With an overview of `before`, bytes are shown as rates, else as totals.
    """
    shown = [_head(told), *_sums(told)]
    if stats := told.get("stats"):
        shown += ["", *_tiers(stats, before, width, told.get("at_s", 0.0))]
        room = None if height is None else height - len(shown)
        shown += _sections(told, room)
    elif told.get("source", {}).get("up"):
        shown.append("no engine has opened the store yet")
    made = [one if isinstance(one, Text) else Text(one) for one in shown[:height]]
    for one in made:
        one.no_wrap = True
        one.truncate(width, overflow="ellipsis")
    return made


def clean(text: object) -> str:
    """What others named, for a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def _head(told: Told) -> Text:
    source = told.get("source", {})
    line = Text("tiercel top  ", style="bold")
    line.append(f"{clean(source.get('kind', ''))} {clean(source.get('where', ''))}", style="default")
    if not source.get("up"):
        line.append("  away", style="bold red")
        return line
    if "uptime_s" in source:
        line.append(f"  up {_duration(source['uptime_s'])}", style="default")
    if "clients" in source:
        line.append(f"  {source['clients']} clients", style="default")
    return line


def _sums(told: Told) -> list[Text | str]:
    source, stats = told.get("source", {}), told.get("stats")
    rows: list[Text | str] = []
    if not source.get("up"):
        rows.append(Text(clean(source.get("why", "")), style="red"))
    if stats is None:
        return rows
    requests, counters = stats["requests"], stats["counters"]
    reused = sum(requests["reused_tokens"].values())
    if requests["prompt_tokens"]:
        hit = (
            f"{reused / requests['prompt_tokens']:.1%} of {requests['prompt_tokens']:,} prompt tokens reused"
        )
    else:
        share = counters["hit"] / counters["looked_up"] if counters["looked_up"] else 0.0
        hit = f"{share:.1%} of {counters['looked_up']:,} blocks found"
    rows.append(f"{requests['requests']:,} requests  {hit}  {stats['leases']} leases  {stats['pins']} pins")
    line = Text()
    line.append(f"{_duration(requests['saved_s'])} saved", style="green")
    line.append(f"  {_duration(requests['spent_s'])} spent")
    for name, label in (("store", "reused"), ("engine", "engine's own"), ("none", "computed")):
        taken = requests["ttft"].get(name)
        count = sum(taken["counts"]) if taken else 0
        if taken and count:
            line.append(f"  TTFT {_seconds(taken['sum_s'] / count)} {label}")
    return [*rows, line]


def _tiers(stats: Told, before: Told | None, width: int, at_s: float) -> list[Text]:
    bar = max(_BAR[0], min(_BAR[1], width - _NAME - _SIZE - _BLOCKS - 2 * _RATE))
    old = {tier["name"]: tier["counters"] for tier in ((before or {}).get("stats") or {}).get("tiers", ())}
    spent_s = at_s - (before or {}).get("at_s", at_s)
    ram_bytes = stats["slots"] * stats["slot_bytes"]
    taken_bytes = stats["ram_blocks"] * stats["slot_bytes"]
    title = " " * (_NAME + bar) + f"{'held':>{_SIZE - 1}} {'blocks':>{_BLOCKS - 1}} "
    title += f"{'read':>{_RATE - 1}} {'written':>{_RATE - 1}}"
    rows = [
        Text(title, style="bright_black"),
        _tier(
            "ram", _bar(taken_bytes, ram_bytes, bar), taken_bytes, ram_bytes, stats["ram_blocks"], "", "", bar
        ),
    ]
    for tier in stats["tiers"]:
        counters = tier["counters"]
        read, written = (
            _flow(counters[name], old.get(tier["name"], {}).get(name), spent_s)
            for name in ("read_bytes", "written_bytes")
        )
        drawn = _bar(tier["used_bytes"], tier["cap_bytes"], bar)
        if tier["breaker"] != "closed":
            drawn = Text(f"breaker {tier['breaker']}"[: bar - 1].ljust(bar), style="bold red")
        held = tier["used_bytes"], tier["cap_bytes"], tier["blocks"]
        row = _tier(tier["name"], drawn, *held, read, written, bar)
        if tier["pending_writes"] or tier.get("pending_reads"):
            row.append(f"  {tier['pending_writes']} to write, {tier.get('pending_reads', 0)} to read")
        rows.append(row)
    return rows


def _tier(
    name: str, drawn: Text, used: int, cap: int | None, blocks: int, read: str, written: str, bar: int
) -> Text:
    size = human_bytes(used) + (f" / {human_bytes(cap)}" if cap else "")
    row = Text(f"{clean(name)[: _NAME - 1]:<{_NAME}}")
    drawn.pad_right(max(0, bar - len(drawn.plain)))
    row.append_text(drawn)
    row.append(f"{size:>{_SIZE - 1}} {blocks:>{_BLOCKS - 1},} {read:>{_RATE - 1}} {written:>{_RATE - 1}}")
    return row


def _bar(used: float, cap: float | None, width: int) -> Text:
    inner = width - 1
    full = round(inner * min(1.0, used / cap)) if cap else 0
    line = Text("█" * full, style="cyan")
    line.append("·" * (inner - full), style="bright_black")
    return line


def _flow(now: int, old: int | None, spent_s: float) -> str:
    """Bytes a second since a moment ago; all of them where there is no moment ago."""
    if old is None or spent_s <= 0 or now < old:
        return _si(now, "B")
    return _si((now - old) / spent_s, "B/s")


def _sections(told: Told, room: int | None) -> list[Text]:
    """What fits below: each section gets a title and its fair share of rows."""
    parts: list[tuple[str, list[Text]]] = [
        (title, rows)
        for title, rows in (
            ("latest requests", [_decision(one) for one in told["decisions"]]),
            ("prefixes, as prompts share them", _prefixes(told["prefixes"])),
            ("scopes", [_scope(one) for one in told["scopes"]]),
            ("faults", [_fault(one, told.get("at_s", 0.0)) for one in told["faults"]]),
        )
        if rows
    ]
    shown: list[Text] = []
    for at, (title, rows) in enumerate(parts):
        if room is not None:
            left = room - len(shown)
            # Each of those to come keeps room for its title and a few rows.
            fair = left - (len(parts) - at - 1) * (2 + _LEAST_ROWS) - 2
            rows = rows[: max(_LEAST_ROWS, fair)]
            if left < 3:
                break
        shown += [Text(""), Text(title, style="bold"), *rows]
    return shown


def _decision(one: Told) -> Text:
    took = one.get("took") or {}
    places = ", ".join(f"{count:,} {clean(place)}" for place, count in one.get("reused_tokens", {}).items())
    row = Text(f"{_clock(one.get('at_s', 0.0))} {one.get('prompt_tokens', 0):>9,} tokens ")
    style = {"load": "green", "split": "green", "recompute": "yellow"}.get(one.get("action", ""), "default")
    row.append(f"{clean(one.get('action', '')):<9} ", style=style)
    if (ttft_s := took.get("ttft_s")) is not None:
        row.append(f"TTFT {_seconds(ttft_s)} ")
    row.append(f"reused {places or 'nothing'}; {clean(one.get('reason', ''))}", style="bright_black")
    return row


def _prefixes(told: Sequence[Told]) -> list[Text]:
    rows = []
    for one in told:
        held = ", ".join(f"{count:,} {clean(place)}" for place, count in one["blocks"].items())
        row = Text("  " * min(one["level"], 8) + f"{clean(one['prefix'])[:12]} ")
        row.append(f"{one['length']:,} blocks from {one['start']:,} ({held})")
        after = f"; {one['below']:,} below in {one['branches']} branches" if one["branches"] else ""
        row.append(f" {human_bytes(max(one['nbytes'].values(), default=0))}{after}", style="bright_black")
        rows.append(row)
    return rows


def _scope(one: Told) -> Text:
    places = ", ".join(
        f"{clean(place)} {count:,} blocks {human_bytes(one['nbytes'].get(place, 0))}"
        for place, count in one["blocks"].items()
    )
    names = " ".join(clean(part) for part in (one["model"], one["adapter"], one["salt"]) if part)
    return Text(f"{one['tag'][:8]} {names or 'unknown model'}: {places}")


def _fault(one: Told, now_s: float) -> Text:
    row = Text(f"{_duration(max(0.0, now_s - one['at_s']))} ago ")
    row.append(f"{clean(one['tier'])} {clean(one['kind'])} ", style="red")
    row.append(f"{one['count']:,} times; {clean(one['text'])}")
    return row


def _si(number: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for size, unit, small, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit} {int(seconds % size // small):02d}{part}"
    return f"{seconds:.1f}s"


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
