"""The report as tables for a terminal. rich is imported when a table is printed, never before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiercel.config import human_bytes

Json = Mapping[str, Any]
_TOKEN_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def print_report(data: Json) -> None:
    """Print a report on standard output."""
    from rich.console import Console

    console = Console(highlight=False)
    for title, table in tables(data):
        console.print(title, style="bold")
        console.print(table)
    for line in notes(data):
        console.print(line, style="dim")


def tables(data: Json) -> list[tuple[str, Any]]:
    """Return the report's rich tables with their titles; empty ones are left out."""
    made = [
        ("Trace", _trace_table(data["trace"])),
        ("Block hit ratio by policy and capacity", _curve_table(data["curves"])),
        ("Capacity that reaches a share of all possible hits", _share_table(data["capacity_for_hits"])),
        ("Time until a block is used again", _interval_table(data["reuse_intervals"])),
    ]
    arms = data.get("arms")
    if arms:
        fleet = data["fleet"]
        tiers = [tier["name"] for tier in fleet["tiers"]]
        on = f"{fleet['hosts']} hosts, {fleet['gpus']} GPUs, {fleet['router']} router"
        made.append((f"Time to first token and hits: {on}", _arm_table(arms, tiers)))
        made.append(("Decisions, in requests", _decision_table(arms)))
        made.append(("Traffic per tier (per host, or of the shared tier)", _wear_table(arms)))
        priced = [arm["money"]["prices_as_of"] for arm in arms.values() if "money" in arm]
        if priced:
            made.append((f"Money over the trace, at your prices of {priced[0]}", _money_table(arms)))
    return [(title, table) for title, table in made if table.row_count]


def notes(data: Json) -> list[str]:
    """What a reader must know to read the tables."""
    lines = [f"{name}: {text}" for name, text in data["assumptions"].items()]
    trace = data["trace"]
    if trace["rechained"]:
        lines.append("ids: the file's ids do not tell the prefix; blocks were renamed by prefix and id")
    if trace["bad_lines_skipped"]:
        lines.append(f"bad lines: {trace['bad_lines_skipped']} skipped; the first: {trace['first_bad_line']}")
    for name, arm in data.get("arms", {}).items():
        busy = arm["engine_utilisation"]
        if busy is not None and busy >= 0.95:
            lines.append(f"{name}: engines are busy {busy:.0%} of the time: queues grow with the trace")
    return lines


def tokens_text(tokens: float) -> str:
    """`4.2M` for 4,200,000."""
    for scale, unit in _TOKEN_UNITS:
        if tokens >= scale:
            return f"{tokens / scale:.3g}{unit}"
    return f"{tokens:.0f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def seconds_text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def bytes_text(value: float | None) -> str:
    return "–" if value is None else human_bytes(value)


def interval_text(row: Json) -> str:
    """`1–3 s`, `10–30 min`, `over 7 days` for a row of the reuse histogram."""
    start, end = row["from_s"], row["to_s"]
    if end is None:
        return f"over {_span(start)}"
    return f"{_span(start)} – {_span(end)}"


def _span(seconds: float) -> str:
    for scale, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= scale:
            return f"{seconds / scale:g} {unit}"
    return f"{seconds:g} s"


def _table(columns: Sequence[str]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _trace_table(trace: Json) -> Any:
    table = _table(("", ""))
    table.add_row("requests", f"{trace['requests']:,} in {seconds_text(trace['duration_s'])}")
    mean = trace["input_tokens_mean"]
    if mean is not None:
        median, most = f"{trace['input_tokens_p50']:,.0f}", f"{trace['input_tokens_max']:,}"
        table.add_row("input tokens", f"mean {mean:,.0f}, median {median}, most {most}")
    once = trace["blocks_used_once"] / trace["unique_blocks"] if trace["unique_blocks"] else 0
    unique = f"{trace['unique_blocks']:,}"
    table.add_row("blocks", f"{unique} of {trace['block_tokens']} tokens, {once:.0%} used once")
    table.add_row("block references", f"{trace['block_references']:,}")
    table.add_row("hit ratio of an infinite cache", percent(trace["infinite_cache_block_hit_ratio"]))
    return table


def _curve_table(curves: Json) -> Any:
    table = _table(("tokens", "bytes", *curves))
    for points in zip(*curves.values(), strict=True):
        first = points[0]
        ratios = (percent(point["block_hit_ratio"]) for point in points)
        table.add_row(tokens_text(first["capacity_tokens"]), bytes_text(first["capacity_bytes"]), *ratios)
    return table


def _share_table(rows: Sequence[Json]) -> Any:
    table = _table(("share", "tokens", "bytes"))
    for row in rows:
        share = f"{row['share_of_achievable_hits']:.0%}"
        table.add_row(share, tokens_text(row["capacity_tokens"]), bytes_text(row["capacity_bytes"]))
    return table


def _interval_table(rows: Sequence[Json]) -> Any:
    table = _table(("interval", "share", "up to here"))
    for row in rows:
        if row["reuses"]:
            table.add_row(interval_text(row), percent(row["share"]), percent(row["cumulative_share"]))
    return table


def _arm_table(arms: Json, tiers: Sequence[str]) -> Any:
    columns = ("", *(f"hit {name}" for name in tiers), "p50", "p90", "p99", "GPU saved", "busy")
    table = _table(columns)
    for name, arm in arms.items():
        hits = (percent(arm["block_hit_ratio_by_tier"].get(tier, 0.0)) for tier in tiers)
        ttft = (seconds_text(arm["ttft_s"][f"p{p}"]) for p in (50, 90, 99))
        table.add_row(name, *hits, *ttft, percent(arm["gpu_saved_share"]), percent(arm["engine_utilisation"]))
    return table


def _decision_table(arms: Json) -> Any:
    table = _table(("", *next(iter(arms.values()))["decisions"]))
    for name, arm in arms.items():
        table.add_row(name, *(f"{count:,}" for count in arm["decisions"].values()))
    return table


def _wear_table(arms: Json) -> Any:
    columns = ("", "tier", "read", "written/hour", "drive writes/day", "rated life")
    table = _table(columns)
    for name, arm in arms.items():
        for tier, traffic in arm["tiers"].items():
            years, dwpd = traffic["years_until_rated_endurance"], traffic["drive_writes_per_day"]
            table.add_row(
                name,
                tier,
                bytes_text(traffic["read_bytes"]),
                bytes_text(traffic["written_bytes_per_hour_per_place"]),
                "–" if dwpd is None else f"{dwpd:.3g}",
                "–" if years is None else f"{years:.3g} years",
            )
    return table


def _money_table(arms: Json) -> Any:
    columns = ("", "GPU", "storage", "GPU saved", "saved after storage", "per 1M input tokens")
    table = _table(columns)
    for name, arm in arms.items():
        money = arm["money"]
        amounts = (money[key] for key in ("gpu", "storage", "gpu_saved", "saved_after_storage"))
        per_million = money["per_million_input_tokens"]
        shown = (f"{amount:,.2f}" for amount in amounts)
        table.add_row(name, *shown, "–" if per_million is None else f"{per_million:.4f}")
    return table
