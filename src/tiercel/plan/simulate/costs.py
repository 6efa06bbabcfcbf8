"""What the simulated machines are and what things cost there: tiers, prefill time, prices.

Only inputs and the two formulas that turn tokens into seconds; no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tiercel.errors import ConfigError
from tiercel.plan.breakeven import Compute, ModelCost

Router = Literal["prefix", "random"]
WriteMode = Literal["through", "evict"]
Admission = Literal["all", "seen-twice"]
HOSTS_MAX = 1000
SECONDS_PER_MONTH = 365.25 / 12 * 86400


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A place for blocks. `capacity_bytes` is per host, or in total if `shared`; the link is per host."""

    name: str
    capacity_bytes: int
    bytes_per_s: float
    latency_s: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0 or self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ConfigError(
                f"tier '{self.name}' has {self.capacity_bytes} bytes, {self.bytes_per_s:g} bytes/s, "
                f"{self.latency_s:g} s; accepted: none negative, bandwidth above zero"
            )


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds to compute x tokens after p others: `fixed + linear * x + quadratic * (x^2 / 2 + x * p)`.

    Linear is the weights' work (2 FLOPs per active parameter and token), quadratic the attention's over
    causal pairs, both over the FLOP/s that one engine reaches.
    """

    linear_s: float
    quadratic_s: float = 0.0
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.linear_s, self.quadratic_s, self.fixed_s) < 0:
            terms = f"{self.fixed_s:g}, {self.linear_s:g}, {self.quadratic_s:g}"
            raise ConfigError(f"prefill cost has the terms {terms} s; accepted: none negative")

    @classmethod
    def of_model(cls, cost: ModelCost, compute: Compute) -> PrefillCost:
        """Take the coefficients from FLOPs and FLOP/s; a window's work is linear once it is full."""
        flops_per_s = compute.tp * compute.gpu_flops * compute.mfu
        linear = 2 * cost.active_params + cost.attn_window_flops * cost.attn_window_tokens
        return cls(linear / flops_per_s, cost.attn_full_flops / flops_per_s)

    def seconds(self, new_tokens: float, cached_tokens: float) -> float:
        """Time to compute `new_tokens` that follow `cached_tokens`; nothing to compute costs nothing."""
        if new_tokens <= 0:
            return 0.0
        pairs = new_tokens * (new_tokens / 2 + cached_tokens)
        return self.fixed_s + self.linear_s * new_tokens + self.quadratic_s * pairs


@dataclass(frozen=True, slots=True)
class Prices:
    """The user's prices, in one currency, and the day they held.

    `gpu_hour` per GPU; `gb_month` by tier name, per 1e9 bytes and month of 30.4 days.
    """

    as_of: str
    gpu_hour: float
    gb_month: dict[str, float]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The machines, how requests reach them and how they keep blocks.

    `engines_per_host` engines of `gpus_per_engine` GPUs each share a host's tiers; each prefills one
    request at a time. With `split`, an engine may compute the near part while the far part loads.
    """

    block_bytes: int
    tiers: tuple[TierSpec, ...]
    prefill: PrefillCost
    hosts: int = 1
    engines_per_host: int = 1
    gpus_per_engine: int = 1
    router: Router = "prefix"
    write: WriteMode = "through"
    admission: Admission = "all"
    promote: bool = True
    always_load: bool = False
    split: bool = False
    seed: int = 0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.block_bytes < 1:
            raise ConfigError(f"block_bytes is {self.block_bytes}; accepted: 1 or more")
        if not 1 <= self.hosts <= HOSTS_MAX:
            raise ConfigError(f"hosts is {self.hosts}; accepted: 1 to {HOSTS_MAX}")
        if self.engines_per_host < 1 or self.gpus_per_engine < 1:
            raise ConfigError("engines per host and GPUs per engine must be 1 or more")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"warmup is {self.warmup:g}; accepted: a share of the requests, 0 up to 1")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise ConfigError(f"tiers are named {', '.join(names)}; accepted: each name once")
        shared = [tier.shared for tier in self.tiers]
        if shared != sorted(shared):
            raise ConfigError("a private tier comes after a shared one; accepted: shared tiers last")

    @property
    def gpus(self) -> int:
        return self.hosts * self.engines_per_host * self.gpus_per_engine
