"""A plan as text for a terminal: a page to read, or with `explain` every number with its formula."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tiercel.config import human_bytes
from tiercel.plan.planner import Plan
from tiercel.plan.planner_files import VLLM_NOTE
from tiercel.plan.strategies import StrategyRow

_HOSTS = "all hosts together"


def describe(plan: Plan) -> str:
    """The page: what fits, what it gains, what to set."""
    parts = [
        "\n".join(_head(plan)),
        "\n".join(_fits(plan)),
        "\n".join(_gains(plan)),
        "\n".join(_break_even(plan)),
        "\n".join(strategy_table(plan.strategies)),
        "tiercel.toml\n" + _indent(plan.config_toml),
        f"vLLM ({VLLM_NOTE})\n" + _indent(_folded(plan.vllm_command)),
    ]
    if plan.warnings:
        parts.insert(1, "\n".join(f"! {line}" for line in plan.warnings))
    parts.append("Every number is arithmetic on the inputs, not a measurement (--explain).")
    return "\n\n".join(parts)


def explain(plan: Plan) -> str:
    """Every input with its origin and every figure with its formula and assumption."""
    lines = ["Inputs"]
    for name, entry in plan.inputs.items():
        lines.append(f"  {name} = {_plain(entry.value)}  ({entry.origin})")
    lines += ["", "Figures"]
    for name, figure in plan.figures.items():
        value = "none" if figure.value is None else _plain(figure.value)
        lines.append(f"  {name} = {value} {figure.unit}")
        lines.append(f"      = {figure.formula}")
        lines.append(f"      assumes: {figure.assumptions}")
    return "\n".join(lines)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == value and abs(value) >= 1e4 else f"{value:.6g}"


def _head(plan: Plan) -> Iterator[str]:
    hardware, traffic = plan.request.hardware, plan.request.traffic
    parallel = f"tp {hardware.tp}, pp {hardware.pp}"
    yield f"{plan.request.model.name} on {hardware.gpus} x {hardware.gpu} ({parallel})"
    yield (
        f"{traffic.sessions:,.0f} sessions, {traffic.turns:g} turns, one every {traffic.idle_s:g} s; "
        f"{traffic.output_tokens:,} tokens answered\n"
        f"prompts of {traffic.context_tokens:,} tokens "
        f"({traffic.new_tokens:,} new, {traffic.shared_tokens:,} shared by all)"
    )


def _fits(plan: Plan) -> Iterator[str]:
    v = plan.value
    yield "What fits where"
    yield _pair("weights per GPU", human_bytes(v("rank_weight_bytes")))
    yield _pair("KV memory per GPU", human_bytes(max(v("hbm_kv_bytes"), 0)))
    yield _pair("KV of one session", human_bytes(v("session_kv_bytes")))
    yield _pair("sessions per GPU", f"{v('hbm_sessions_per_gpu'):,.2f} in its memory")
    yield _pair("all sessions", f"{human_bytes(v('working_set_bytes'))} ({_HOSTS})")
    shares = ("hbm_share", "ram_share", "disk_share")
    hbm, ram, disk = (v(name) for name in shares)
    yield _pair(
        "held in", f"HBM {hbm:.0%}, RAM {ram:.0%}, disk {disk:.0%}, nowhere {1 - hbm - ram - disk:.0%}"
    )
    sizes = f"RAM {human_bytes(v('ram_bytes'))}, disk {human_bytes(v('disk_bytes'))}"
    yield _pair("recommended", f"{sizes} ({_HOSTS})")
    yield _pair("written to tiers", f"{v('write_bytes_per_s') / 1e9:.2f} GB/s of new KV")
    yield _pair("read from disk", f"{v('disk_read_bytes_per_s') / 1e9:.2f} GB/s, {v('disk_load'):.0%} busy")


def _gains(plan: Plan) -> Iterator[str]:
    v = plan.value
    yield "Time to first token (no queue)"
    yield _pair("nothing cached", seconds(v("ttft_recompute_s")))
    yield _pair("prefix in HBM", seconds(v("ttft_hbm_s")))
    yield _pair("prefix in RAM", f"{seconds(v('ttft_ram_s'))}  ({v('ttft_hit_gain'):.1f} x sooner)")
    yield _pair("prefix on disk", seconds(v("ttft_disk_s")))
    yield _pair("mean, without", f"{seconds(v('ttft_without_s'))}  (the engine's own prefix cache)")
    yield _pair("mean, with tiers", f"{seconds(v('ttft_with_s'))}  ({v('ttft_gain'):.1f} x sooner)")
    yield ""
    yield "GPU work"
    yield _pair("load", f"{v('load_without'):.0%} without, {v('load_with'):.0%} with")
    yield _pair(
        "sessions per GPU",
        f"{v('sessions_per_gpu_without'):,.1f} without, {v('sessions_per_gpu_with'):,.1f} with (compute)",
    )
    if plan.request.prices.complete:
        yield from _costs(plan)
    else:
        yield _pair("cost", "give --gpu-price, --ram-price, --disk-price (3.50@2026-05)")


def _costs(plan: Plan) -> Iterator[str]:
    v = plan.value
    dates = sorted({plan.inputs[name].origin for name in plan.inputs if name.endswith("_price")})
    yield _pair("cost per 1M tokens", f"{v('cost_without'):.4f} without, {v('cost_with'):.4f} with tiers")
    yield _pair("", f"of which tiers {v('cost_storage'):.4f}; prices {'; '.join(dates)}")
    keep = f"{duration(v('keep_ram_s'))} in RAM, {duration(v('keep_disk_s'))} on disk"
    yield _pair("worth keeping", f"{keep}, then computing again is cheaper")


def _break_even(plan: Plan) -> Iterator[str]:
    yield "Break-even: load or recompute a prefix of so many tokens"
    columns = [n for n in plan.prefix_tokens if n in (1024, 4096, 8192, 32768, 131072)]
    at = [plan.prefix_tokens.index(n) for n in columns]
    rows = [["", "rate", *(_k(n) for n in columns), "loading wins from"]]
    rows.append(["needed GB/s", "", *(f"{plan.needed_bytes_per_s[i] / 1e9:.2f}" for i in at), ""])
    rows.append(["compute", "", *(seconds(plan.compute_s[i]) for i in at), ""])
    for tier in plan.break_even:
        least = _least(tier.least_prefix_tokens)
        rate = f"{tier.link.bytes_per_s / 1e9:g} GB/s"
        rows.append([tier.link.title, rate, *(seconds(tier.load_s[i]) for i in at), least])
    yield from table(rows)


def _least(tokens: int | None) -> str:
    return "never" if tokens is None else "1 token" if tokens == 1 else f"{tokens:,} tokens"


def strategy_table(strategies: Sequence[StrategyRow]) -> Iterator[str]:
    """The comparison of strategies, a line each."""
    yield "What each strategy would give"
    with_cost = any(row.cost_per_million is not None for row in strategies)
    head = ["", "KV/token", "in HBM per GPU", "held", "TTFT cold", "mean", "sessions/GPU"]
    rows = [[*head, *(["per 1M"] if with_cost else []), ""]]
    notes = []
    for row in strategies:
        if row.session_bytes is None:
            notes.append(f"  {row.name}: {row.reason}")
            continue
        cells = [
            row.name,
            human_bytes(row.kv_bytes_per_token or 0),
            f"{row.hbm_sessions_per_gpu or 0:,.1f}",
            f"{row.sessions_held or 0:,.0f}",
            seconds(row.ttft_cold_s or 0),
            seconds(row.ttft_mean_s or 0),
            f"{row.sessions_per_gpu or 0:,.1f}",
        ]
        if with_cost:
            cells.append("" if row.cost_per_million is None else f"{row.cost_per_million:.4f}")
        rows.append([*cells, row.effect])
    yield from table(rows)
    yield from notes


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns padded to their widest cell; the first and the last to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        inner = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        yield "  ".join(["  " + row[0].ljust(widths[0]), *inner, row[-1]]).rstrip()


def seconds(value_s: float) -> str:
    """Seconds as a person reads them: `412 ms`, `3.05 s`."""
    if not math.isfinite(value_s):
        return "never"
    return f"{value_s * 1e3:.3g} ms" if value_s < 0.9995 else f"{value_s:,.2f} s"


def duration(value_s: float) -> str:
    """A longer time in its largest unit."""
    for unit, length_s in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value_s >= length_s:
            return f"{value_s / length_s:,.1f} {unit}"
    return f"{value_s:.3g} s"


def _k(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _pair(name: str, value: str) -> str:
    return f"  {name:<20} {value}"


def _folded(command: str) -> str:
    """A shell command with each option on a line of its own, to be pasted as it stands."""
    return command.replace(" --", " \\\n  --")


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.rstrip().splitlines())
