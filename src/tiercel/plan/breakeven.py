"""Load or recompute: from which bandwidth on is reading a prefix back faster than computing it again?

The formulas live once, as cells of a sheet (`CELLS`); the functions below evaluate them and the planner's
sheet contains them. It never measures: FLOP/s, MFU and bandwidths are inputs.

Sources. Prefill FLOPs: two per active parameter and token, plus, per layer and pair of tokens that attend to
each other, two per head and dimension for the scores and two for the values (causal: half the square).
The inequality is the one of Mooncake (Qin et al., FAST '25, equation 2), generalised from one LLaMA shape to
any geometry; `mooncake_bytes_per_s` is the original. The split is the idea of Cake (Jin et al., 2024).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tiercel.errors import ConfigError
from tiercel.plan.hardware import DEFAULT_MFU, Link
from tiercel.plan.planner_sheet import Cell, Scope, Sheet

PREFIX_LIMIT_TOKENS = 1_048_576

INPUTS = (
    "active_params",
    "attn_full_flops",
    "attn_window_flops",
    "attn_window_tokens",
    "kv_token_bytes",
    "kv_window_token_bytes",
    "kv_window_tokens",
    "kv_fixed_bytes",
    "gpu_flops",
    "mfu",
    "tp",
    "compression",
)

CELLS = (
    Cell(
        "windowed_pairs",
        "min(n, attn_window_tokens) * min(n, attn_window_tokens) / 2"
        " + max(n - attn_window_tokens, 0) * attn_window_tokens",
        "token pairs",
        "causal attention that looks back at most one window",
        ("n",),
    ),
    Cell(
        "prefill_flops",
        "2 * active_params * x + attn_full_flops * (x * x / 2 + x * p)"
        " + attn_window_flops * (windowed_pairs(p + x) - windowed_pairs(p))",
        "FLOP",
        "x new tokens after p cached ones; 2 FLOPs per active parameter and token; causal attention",
        ("x", "p"),
    ),
    Cell(
        "kv_bytes",
        "kv_token_bytes * n + kv_window_token_bytes * min(n, kv_window_tokens) + kv_fixed_bytes",
        "bytes",
        "one sequence of n tokens, every distinct byte once over all GPUs of the replica",
        ("n",),
    ),
    Cell(
        "compute_s",
        "prefill_flops(x, p) / (tp * gpu_flops * mfu)",
        "s",
        "tensor parallel scales perfectly; MFU is the same at every length",
        ("x", "p"),
    ),
    Cell(
        "load_s",
        "latency_s + bytes / (compression * bytes_per_s)",
        "s",
        "one stream, nothing else on the link, decompression hidden",
        ("bytes", "bytes_per_s", "latency_s"),
    ),
    Cell(
        "breakeven_bytes_per_s",
        "kv_bytes(p) / (compression * compute_s(p, 0))",
        "bytes/s",
        "loading p tokens wins above this rate (latency left out); falls with p as attention is quadratic",
        ("p",),
    ),
    Cell(
        "least_prefix",
        "least(lambda p: compute_s(p, 0) - load_s(kv_bytes(p), bytes_per_s, latency_s),"
        f" {PREFIX_LIMIT_TOKENS})",
        "tokens",
        "shortest prefix for which loading beats computing, latency included; infinite: never up to 2^20",
        ("bytes_per_s", "latency_s"),
    ),
    Cell(
        "split_tokens",
        "least(lambda x: compute_s(x, 0) - load_s(kv_bytes(p - x), bytes_per_s, latency_s), p)",
        "tokens",
        "compute the first x tokens while the last p - x load; both end together (Cake)",
        ("p", "bytes_per_s", "latency_s"),
    ),
)

SHEET = Sheet(INPUTS, CELLS)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one sequence costs, in the sheet's terms.

    `attn_full_flops`: 2 * layers * heads * (d_qk + d_v) summed over layers that see everything;
    `attn_window_flops` the same for layers that see `attn_window_tokens`. The `kv_` fields give bytes.
    """

    active_params: float
    attn_full_flops: float
    kv_token_bytes: float
    attn_window_flops: float = 0
    attn_window_tokens: float = 0
    kv_window_token_bytes: float = 0
    kv_window_tokens: float = 0
    kv_fixed_bytes: float = 0


@dataclass(frozen=True, slots=True)
class Compute:
    """What computes the prefill: dense FLOP/s of one GPU, the share of it reached, tensor parallel size."""

    gpu_flops: float
    mfu: float = DEFAULT_MFU
    tp: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.mfu <= 1:
            raise ConfigError(f"mfu is {self.mfu:g}; accepted: more than 0, up to 1 (0.5 is usual)")
        if self.gpu_flops <= 0 or self.tp < 1:
            raise ConfigError(f"gpu_flops {self.gpu_flops:g} and tp {self.tp} must be positive")


def scope(cost: ModelCost, compute: Compute, compression: float = 1.0) -> Scope:
    """The break-even sheet with a model and a GPU filled in."""
    return SHEET.bind({**asdict(cost), **asdict(compute), "compression": compression})


def prefill_flops(cost: ModelCost, new_tokens: int, cached_tokens: int = 0) -> float:
    """FLOPs to prefill `new_tokens` after `cached_tokens`."""
    return SHEET.bind(asdict(cost)).call("prefill_flops", new_tokens, cached_tokens)


def prefill_s(cost: ModelCost, compute: Compute, new_tokens: int, cached_tokens: int = 0) -> float:
    """Seconds to prefill `new_tokens` after `cached_tokens`."""
    return scope(cost, compute).call("compute_s", new_tokens, cached_tokens)


def load_s(cost: ModelCost, link: Link, tokens: int, compression: float = 1.0) -> float:
    """Seconds to load the KV of a prefix of `tokens` over `link`."""
    bound = SHEET.bind({**asdict(cost), "compression": compression})
    return bound.call("load_s", bound.call("kv_bytes", tokens), link.bytes_per_s, link.latency_s)


def breakeven_bytes_per_s(cost: ModelCost, compute: Compute, prefix_tokens: int) -> float:
    """Bandwidth above which loading `prefix_tokens` beats computing them."""
    return scope(cost, compute).call("breakeven_bytes_per_s", prefix_tokens)


def least_prefix_tokens(cost: ModelCost, compute: Compute, link: Link) -> float:
    """Shortest prefix worth loading over `link`, in tokens; infinity when none up to 1 Mi tokens is."""
    return scope(cost, compute).call("least_prefix", link.bytes_per_s, link.latency_s)


def split(cost: ModelCost, compute: Compute, link: Link, prefix_tokens: int) -> tuple[int, float]:
    """(tokens to compute, seconds until all is there): the near part is computed while the far part loads."""
    bound = scope(cost, compute)
    first = bound.call("split_tokens", prefix_tokens, link.bytes_per_s, link.latency_s)
    tokens = prefix_tokens if first == float("inf") else int(first)
    return tokens, bound.call("compute_s", tokens, 0)


def calibrated_mfu(cost: ModelCost, gpu_flops: float, tp: int, prompt_tokens: int, ttft_s: float) -> float:
    """The MFU that a cold prompt's measured time to first token implies. Raises ConfigError if above 1."""
    if ttft_s <= 0 or prompt_tokens <= 0:
        raise ConfigError(
            f"calibration needs a prompt and a time above zero, got {prompt_tokens}, {ttft_s:g} s"
        )
    mfu = prefill_flops(cost, prompt_tokens) / (tp * gpu_flops * ttft_s)
    if mfu > 1:
        raise ConfigError(
            f"{prompt_tokens} tokens in {ttft_s:g} s would be {mfu:.0%} of the GPU's peak; "
            "check that the prompt was not cached, and the GPU and its dtype"
        )
    return mfu


def keep_s(cost: ModelCost, compute: Compute, tokens: int, gpu_hour: float, gb_month: float) -> float:
    """How long storing a prefix stays cheaper than computing it again, in seconds.

    Recompute price over storage price per second: `gpu_hour` per GPU and hour, `gb_month` per 1e9 bytes and
    month of 365.25 / 12 days, in one currency.
    """
    recompute = prefill_s(cost, compute, tokens) * compute.tp * gpu_hour / 3600
    stored_bytes = SHEET.bind(asdict(cost)).call("kv_bytes", tokens)
    return recompute / (stored_bytes / 1e9 * gb_month / (365.25 / 12 * 86400))


def mooncake_bytes_per_s(
    hidden: int, gqa_ratio: float, prefix_tokens: int, node_flops: float, element_bytes: float = 2
) -> float:
    """Mooncake's inequality: B > G * 2 d s / (gqa * (a p d + b d^2)), a = 4, b = 22, at peak FLOP/s G.

    `gqa_ratio` is query heads per KV head. FAST '25, equation 2, for models of LLaMA's shape.
    """
    work = 4.0 * prefix_tokens * hidden + 22.0 * hidden * hidden
    return node_flops * 2 * hidden * element_bytes / (gqa_ratio * work)
