"""A `SizeReport` as text for people: what grows, what stays, what it comes to, with the arithmetic.

Plain lines, no terminal control, so that a report can be pasted anywhere. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from tiercel.geometry import GroupKind
from tiercel.plan.size import Fit, GroupSize, SizeReport, WeightRow
from tiercel.plan.weights import Parameters

_DECIMAL = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_WIDE = 78


def both(nbytes: int | Fraction) -> str:
    """`nbytes` in decimal and in binary units, such as '4.29 GB = 4.00 GiB'."""
    if nbytes < 1000:
        return f"{exact(Fraction(nbytes))} B"
    return f"{_scaled(nbytes, _DECIMAL)} = {_scaled(nbytes, _BINARY)}"


def _scaled(nbytes: int | Fraction, units: Sequence[tuple[int, str]]) -> str:
    for size, unit in units:
        if nbytes >= size:
            return f"{_three(float(nbytes) / size)} {unit}"
    return f"{exact(Fraction(nbytes))} B"


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def exact(value: Fraction) -> str:
    """A byte count with thousands separators, fractions kept."""
    if value.denominator == 1:
        return f"{int(value):,}"
    return f"{float(value):,.4f}".rstrip("0")


def _folded(text: str, result: str) -> list[str]:
    """A formula and what it comes to, on a second line where both are too wide for a terminal."""
    line = f"{text} {result}"
    return [line] if len(line) <= _WIDE + 2 else [text, f"           {result}"]


def headline(title: str, source: str, report: SizeReport) -> list[str]:
    """Which model, from where, and what is asked."""
    geometry = report.geometry
    limit = f"{geometry.max_tokens:,} tokens" if geometry.max_tokens else "not stated"
    shape = f"{geometry.model_type}, {geometry.num_layers} layers, context limit {limit}"
    lines = [
        *([f"{title}   {shape}"] if len(title) + len(shape) < _WIDE else [title, f"  {shape}"]),
        f"  from {source}",
        f"  KV in {report.dtype.name} ({report.dtype.note}), storage: {report.stored.engine.value}",
    ]
    lines += [f"    {note}" for note in report.stored.notes]
    if geometry.max_tokens and report.tokens > geometry.max_tokens:
        lines.append(f"  note: {report.tokens:,} tokens are beyond the model's own context limit")
    return lines


def _group_line(size: GroupSize) -> list[str]:
    group = size.group
    if group.kind is GroupKind.SHARED:
        return [f"  {'shared':<8} {size.formula}: 0 B"]
    if group.kind is GroupKind.STATE:
        return [f"  {'state':<8} {size.formula}", f"           = {size.fixed_bytes:,} B per sequence"]
    if group.kind is GroupKind.CROSS:
        known = (
            f"= {size.fixed_bytes:,} B per sequence"
            if group.source_tokens
            else "(not counted: --source-tokens)"
        )
        return _folded(f"  {'cross':<8} {size.formula}", known)
    result = f"= {exact(size.bytes_per_token)} B/token"
    cap = f", for {group.window_tokens:,} tokens at most" if group.window_tokens else ""
    note = f"   [{group.note}]" if group.note else ""
    return _folded(f"  {group.kind.value:<8} {size.formula}", f"{result}{cap}{note}")


def cache_lines(report: SizeReport) -> list[str]:
    """The layer groups with their formulas, and the three parts they add up to."""
    lines = ["", "KV cache by layer group"]
    for size in report.groups:
        lines += _group_line(size)
    lines += ["", "In parts"]
    lines.append(f"  grows    {exact(report.bytes_per_token)} B per token   ({both(report.bytes_per_token)})")
    if report.window_tokens:
        cap = sum(
            (g.bytes_per_token * g.group.window_tokens for g in report.groups if g.group.window_tokens),
            Fraction(0),
        )
        per_token = exact(report.window_bytes_per_token)
        lines.append(
            f"  windowed {per_token} B per token, up to {report.window_tokens:,} tokens: at most {both(cap)}"
        )
    if report.fixed_state_bytes:
        fixed = report.fixed_state_bytes
        lines.append(f"  fixed    {fixed:,} B per sequence   ({both(fixed)})")
    lines += ["", "In all"]
    each = report.sequence_bytes
    lines.append(f"  1 sequence × {report.tokens:,} tokens = {each:,} B = {both(each)}")
    if report.batch > 1:
        lines.append(f"  {report.batch:,} sequences × {report.tokens:,} tokens = {both(report.total_bytes)}")
    return lines


def rank_lines(report: SizeReport) -> list[str]:
    """What each rank holds; nothing for one rank."""
    share, parallel = report.share, report.parallel
    if share.ranks == 1:
        return []
    copies = share.all_ranks_bytes / report.total_bytes if report.total_bytes else 1.0
    stages = ""
    if parallel.pp > 1:
        stages = f", stages of {' + '.join(str(n) for n in _short(share.stage_layers))} layers"
    lines = [
        "",
        f"Per rank (tp {parallel.tp} × pp {parallel.pp} × cp {parallel.cp} = {share.ranks} ranks{stages})",
    ]
    lines.append(f"  grows    {exact(share.bytes_per_token)} B per token on the fullest rank")
    if share.window_bytes_per_token:
        lines.append(f"  windowed {exact(share.window_bytes_per_token)} B per token")
    if share.fixed_state_bytes:
        lines.append(f"  fixed    {share.fixed_state_bytes:,} B per sequence")
    lines.append(f"  holds    {both(share.total_bytes)}; all ranks together {both(share.all_ranks_bytes)}")
    lines.append(f"  {copies:.2f} copies of the cache on the GPUs; distinct shards: {share.distinct_shards}")
    lines.append("  (a store keeps one of each)")
    return lines


def _short(stages: tuple[int, ...]) -> Iterable[object]:
    return stages if len(stages) <= 8 else (*stages[:7], "…")


def weight_lines(report: SizeReport, parameters: Parameters, rows: Sequence[WeightRow]) -> list[str]:
    """Weights by format, and where the KV cache overtakes them."""
    lines = ["", f"Weights ({parameters.total / 1e9:,.2f} B parameters: {parameters.how})"]
    lines.append(f"  {'format':<10} {'bytes':<21} KV weighs as much at")
    for row in rows:
        one = (
            f"one of {row.tokens:,} tokens" if row.tokens is not None else "never one alone (windows fill up)"
        )
        where = f"{row.sequences:,} of {report.tokens:,}, or {one}" if report.sequence_bytes else one
        lines.append(f"  {row.format.name:<10} {both(row.nbytes):<21} {where}")
    notes = sorted({f"{row.format.name}: {row.format.note}" for row in rows if row.format.note})
    return lines + [f"    {note}" for note in notes]


def fit_lines(report: SizeReport, fit: Fit) -> list[str]:
    """The answer to the reverse question."""
    lines = ["", "What fits"]
    if fit.told:
        lines.append(f"  {fit.told}")
    if fit.kv_bytes <= 0:
        lines.append(
            f"  the weights do not fit: {both(-fit.kv_bytes)} short per rank; more ranks or fewer bits"
        )
        return lines
    lines.append(f"  {both(fit.kv_bytes)} for KV on each rank")
    count = f"{fit.sequences:,}" if report.sequence_bytes else "any number of"
    lines.append(f"  {count} sequences of {report.tokens:,} tokens at once")
    longest = "of any length" if fit.tokens is None else f"of {fit.tokens:,} tokens"
    lines.append(f"  or one sequence {longest}")
    return lines
