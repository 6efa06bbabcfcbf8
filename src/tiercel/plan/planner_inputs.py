"""What the planner is told: model, GPUs, links, traffic, prices; checked, and turned into sheet inputs.

Every input carries where its value comes from (given, a data sheet, or an assumption of ours). Prices have
no default: a price is the reader's and has a date, or there is no cost in the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from tiercel.errors import ConfigError
from tiercel.geometry import kv_dtype
from tiercel.plan.hardware import (
    DEFAULT_MFU,
    DEFAULT_PCIE_EFFICIENCY,
    GIB,
    TABLE_DATE,
    Gpu,
    Link,
    gpu_named,
    link_named,
    ram_link,
)
from tiercel.plan.parallel import Parallel
from tiercel.plan.planner_model import PlanModel, model_inputs
from tiercel.plan.weights import weight_format

NO_LIMIT_BYTES = 1e18


@dataclass(frozen=True, slots=True)
class Price:
    """What somebody pays, and as of when: `amount` in any one currency, `date` as YYYY-MM or YYYY-MM-DD."""

    amount: float
    date: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs and what hangs on them. Limits are for all hosts together; None means no limit."""

    gpu: str = "h100"
    gpus: int = 1
    tp: int = 1
    pp: int = 1
    mfu: float = DEFAULT_MFU
    compute_dtype: str = "bf16"
    hbm_use: float = 0.9
    hbm_reserve_bytes: int = 2 * GIB
    hbm_efficiency: float = 0.8
    pcie_efficiency: float = DEFAULT_PCIE_EFFICIENCY
    ram_limit_bytes: int | None = None
    disk: str = "nvme"
    disk_bytes_per_s: float | None = None
    disk_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Who comes how often. `idle_s` is from the start of a session's turn to the start of its next."""

    sessions: float = 100
    context_tokens: int = 8192
    new_tokens: int = 512
    output_tokens: int = 256
    turns: float = 8
    idle_s: float = 60
    shared_tokens: int = 0
    told: str = "given or default"


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per GPU and hour, and per 1e9 bytes and month of RAM and disk. Costs need all three."""

    gpu_hour: Price | None = None
    ram_gb_month: Price | None = None
    disk_gb_month: Price | None = None

    @property
    def complete(self) -> bool:
        return None not in (self.gpu_hour, self.ram_gb_month, self.disk_gb_month)


@dataclass(frozen=True, slots=True)
class Storage:
    """Formats of KV cache and weights, and by how much a codec shrinks KV between tiers (1: not)."""

    kv_dtype: str = "bfloat16"
    weights: str = "bf16"
    compression: float = 1.0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One question to the planner."""

    model: PlanModel
    hardware: Hardware = Hardware()
    traffic: Traffic = Traffic()
    prices: Prices = Prices()
    storage: Storage = Storage()


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the sheet: its value, and where it is from."""

    value: float
    origin: str


BOUNDS: dict[str, tuple[float, float]] = {
    "gpus": (1, 1e6),
    "tp": (1, 65_536),
    "pp": (1, 65_536),
    "mfu": (0.001, 1),
    "hbm_use": (0.01, 1),
    "hbm_reserve_bytes": (0, 1e13),
    "hbm_efficiency": (0.01, 1),
    "pcie_efficiency": (0.01, 1),
    "ram_limit_bytes": (0, 1e18),
    "disk_bytes_per_s": (1e6, 1e13),
    "disk_limit_bytes": (0, 1e18),
    "sessions": (1, 1e9),
    "context_tokens": (1, 1e8),
    "new_tokens": (1, 1e8),
    "output_tokens": (0, 1e7),
    "turns": (1, 1e6),
    "idle_s": (0.001, 1e8),
    "shared_tokens": (0, 1e8),
    "compression": (0.1, 100),
}


def check(request: PlanRequest) -> None:
    """Raise ConfigError, one line, for a value out of range or two that contradict each other."""
    for part in (request.hardware, request.traffic, request.storage):
        for item in fields(part):
            value = getattr(part, item.name)
            if item.name in BOUNDS and value is not None:
                _within(item.name, value)
    hardware, traffic = request.hardware, request.traffic
    if hardware.compute_dtype not in ("bf16", "fp8"):
        raise ConfigError(f"compute-dtype: {hardware.compute_dtype!r}; accepted: bf16, fp8")
    if hardware.tp * hardware.pp > hardware.gpus:
        raise ConfigError(
            f"tp {hardware.tp} x pp {hardware.pp} needs {hardware.tp * hardware.pp} GPUs; "
            f"accepted: at most the {hardware.gpus} given"
        )
    for name in ("new_tokens", "shared_tokens"):
        value, top = getattr(traffic, name), traffic.context_tokens - (name == "shared_tokens")
        if value > top:
            raise ConfigError(f"{_flag(name)}: {value}; accepted: at most {top}, as the prompt has {top}")
    prices = request.prices
    for name, price in (
        ("gpu", prices.gpu_hour),
        ("ram", prices.ram_gb_month),
        ("disk", prices.disk_gb_month),
    ):
        if price is not None and not (math.isfinite(price.amount) and price.amount >= 0):
            raise ConfigError(f"{name}-price: {price.amount:g}; accepted: a number of at least 0")


def _flag(name: str) -> str:
    for suffix in ("_bytes_per_s", "_bytes", "_tokens", "_s"):
        name = name.removesuffix(suffix)
    return name.replace("_", "-")


def _within(name: str, value: float) -> None:
    least, top = BOUNDS[name]
    if not (math.isfinite(value) and least <= value <= top):
        raise ConfigError(f"{_flag(name)}: {value:g}; accepted: from {least:g} to {top:g}")


def disk_of(hardware: Hardware) -> Link:
    """The link to the tier below RAM, with the rate replaced where one is given. Raises ConfigError."""
    link = link_named(hardware.disk)
    if hardware.disk_bytes_per_s is None:
        return link
    told = f"{hardware.disk_bytes_per_s / 1e9:g} GB/s given; {link.latency_s * 1e3:g} ms assumed"
    return replace(link, bytes_per_s=hardware.disk_bytes_per_s, assumption=told)


def sheet_inputs(request: PlanRequest) -> dict[str, Input]:
    """Every input of the sheet with its origin. Raises ConfigError or GeometryError."""
    check(request)
    hardware, storage = request.hardware, request.storage
    gpu = gpu_named(hardware.gpu)
    dtype, weights = kv_dtype(storage.kv_dtype), weight_format(storage.weights)
    parallel = Parallel(hardware.tp, hardware.pp)
    told = f"{request.model.name}: KV as {dtype.name}, weights as {weights.name}; " + "; ".join(
        request.model.assumptions
    )
    numbers = model_inputs(request.model, dtype, weights, parallel)
    inputs = {name: Input(value, told) for name, value in numbers.items()}
    return (
        inputs
        | _hardware(hardware, gpu)
        | _traffic(request.traffic)
        | _prices(request.prices)
        | {"compression": Input(storage.compression, "given; 1 is raw bytes")}
    )


def _hardware(hardware: Hardware, gpu: Gpu) -> dict[str, Input]:
    sheet = f"{gpu.title}; {gpu.source}; table of {TABLE_DATE}"
    ram, disk = ram_link(gpu, hardware.pcie_efficiency), disk_of(hardware)
    given = {
        name: Input(float(getattr(hardware, name)), "given or default")
        for name in ("gpus", "tp", "pp", "mfu", "hbm_use", "hbm_reserve_bytes", "hbm_efficiency")
    }
    return given | {
        "gpu_flops": Input(gpu.flops_for(hardware.compute_dtype), f"{hardware.compute_dtype}, {sheet}"),
        "hbm_bytes": Input(float(gpu.hbm_bytes), sheet),
        "hbm_bytes_per_s": Input(gpu.hbm_bytes_per_s, sheet),
        "ram_bytes_per_s": Input(ram.bytes_per_s, ram.assumption),
        "ram_latency_s": Input(ram.latency_s, ram.assumption),
        "disk_bytes_per_s": Input(disk.bytes_per_s, disk.assumption),
        "disk_latency_s": Input(disk.latency_s, disk.assumption),
        "ram_limit_bytes": _limit(hardware.ram_limit_bytes),
        "disk_limit_bytes": _limit(hardware.disk_limit_bytes),
    }


def _limit(limit_bytes: int | None) -> Input:
    if limit_bytes is None:
        return Input(NO_LIMIT_BYTES, "no limit given")
    return Input(float(limit_bytes), "given")


def _traffic(traffic: Traffic) -> dict[str, Input]:
    names = (item.name for item in fields(traffic) if item.name != "told")
    return {name: Input(float(getattr(traffic, name)), traffic.told) for name in names}


def _prices(prices: Prices) -> dict[str, Input]:
    found = {
        "gpu_hour_price": prices.gpu_hour,
        "ram_gb_month_price": prices.ram_gb_month,
        "disk_gb_month_price": prices.disk_gb_month,
    }
    return {
        name: Input(math.nan, "not given: no cost is shown")
        if price is None
        else Input(price.amount, f"given, as of {price.date}")
        for name, price in found.items()
    }
