"""The report as one HTML file: charts, tables and assumptions, nothing loaded from anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from tiercel.plan.simulate.charts import charts
from tiercel.plan.simulate.text import bytes_text, notes, percent, seconds_text, tokens_text
from tiercel.report import files
from tiercel.report.page import page
from tiercel.report.style import STYLE
from tiercel.report.svg import chart_svg, legend_html

Json = Mapping[str, Any]


def write_page(path: Path, data: Json, ttft_s: Mapping[str, Any]) -> None:
    """Write the page. Raises ConfigError when the file cannot be written."""
    files.write_page(path, page_html(data, ttft_s))


def page_html(data: Json, ttft_s: Mapping[str, Any]) -> str:
    """Return the page's text."""
    cards = "".join(
        f"<section><h2>{escape(chart.title)}</h2>{chart_svg(chart)}{legend_html(chart)}"
        f'<p class="note">{escape(chart.note)}</p></section>'
        for chart in charts(data, ttft_s)
    )
    body = (
        "<h1>What a KV cache would do with this traffic</h1>"
        f'<p class="source">{escape(data["trace"]["source"])}</p>{_facts(data)}'
        f'<div class="cards">{cards}</div>{_arms(data)}{_shares(data)}{_curve_table(data)}{_notes(data)}'
    )
    return page(f"KV cache simulation: {Path(data['trace']['source']).name}", STYLE, body)


def _facts(data: Json) -> str:
    trace = data["trace"]
    facts = [
        ("requests", f"{trace['requests']:,}"),
        ("over", seconds_text(trace["duration_s"])),
        ("tokens per request", tokens_text(trace["input_tokens_mean"] or 0)),
        ("best possible hit ratio", percent(trace["infinite_cache_block_hit_ratio"])),
    ]
    if trace["block_bytes"]:
        facts.append(("a block", bytes_text(trace["block_bytes"])))
    for name, arm in list(data.get("arms", {}).items())[1:2]:
        facts.append((f"GPU time saved ({name})", percent(arm["gpu_saved_share"])))
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    return f'<dl class="facts">{cells}</dl>'


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<section class="wide"><h2>{escape(title)}</h2><div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _arms(data: Json) -> str:
    if "arms" not in data:
        return ""
    tiers = [tier["name"] for tier in data["fleet"]["tiers"]]
    money = any("money" in arm for arm in data["arms"].values())
    head = ["", *(f"from {t}" for t in tiers), "TTFT p50", "p90", "p99", "GPU saved", "engines busy"]
    head += ["saved after storage", "per 1M input tokens"] if money else []
    rows = []
    for name, arm in data["arms"].items():
        row = [name, *(percent(arm["block_hit_ratio_by_tier"].get(t, 0.0)) for t in tiers)]
        row += [seconds_text(arm["ttft_s"][f"p{p}"]) for p in (50, 90, 99)]
        row += [percent(arm["gpu_saved_share"]), percent(arm["engine_utilisation"])]
        if money:
            row.append(f"{arm['money']['saved_after_storage']:,.2f}")
            row.append(f"{arm['money']['per_million_input_tokens'] or 0:.4f}")
        rows.append(row)
    fleet = data["fleet"]
    return _table(f"{fleet['hosts']} hosts, {fleet['gpus']} GPUs, {fleet['router']} router", head, rows)


def _shares(data: Json) -> str:
    rows = [
        [
            f"{row['share_of_achievable_hits']:.0%}",
            tokens_text(row["capacity_tokens"]),
            bytes_text(row["capacity_bytes"]),
        ]
        for row in data["capacity_for_hits"]
    ]
    return _table("Capacity that reaches a share of all possible hits", ["share", "tokens", "bytes"], rows)


def _curve_table(data: Json) -> str:
    curves = data["curves"]
    rows = []
    for points in zip(*curves.values(), strict=True):
        size = [tokens_text(points[0]["capacity_tokens"]), bytes_text(points[0]["capacity_bytes"])]
        rows.append(size + [percent(point["block_hit_ratio"]) for point in points])
    return _table("Block hit ratio by capacity and policy", ["tokens", "bytes", *curves], rows)


def _notes(data: Json) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in notes(data))
    body = f'<h2>Assumptions</h2><ul class="assumptions">{lines}</ul>'
    return f'<section class="wide">{body}</section>' if lines else ""
