"""From the texts of flags, query strings and forms to a `PlanRequest`; the one reader for all three.

Names are the flags' without dashes. It refuses what it does not know, naming the nearest, and quantities
without a unit where one is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from tiercel.config import parse_bytes, parse_seconds
from tiercel.errors import ConfigError
from tiercel.geometry import kv_dtype
from tiercel.plan.breakeven import calibrated_mfu
from tiercel.plan.hardware import gpu_named, link_named
from tiercel.plan.planner_inputs import Hardware, PlanRequest, Price, Prices, Storage, Traffic
from tiercel.plan.planner_model import PlanModel, load_model, model_cost

T = TypeVar("T")
ModelOpener = Callable[[str, float | None, float | None], PlanModel]

WHOLE_CHARS_MAX = 15  # exact as a double, whatever the digits
_DATE = re.compile(r"\d{4}-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?")
_CALIBRATION = re.compile(r"(\d+)=(.+)")


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name, what a value looks like, its default as text ('' for none), and its help."""

    name: str
    metavar: str
    default: str
    help: str


OPTIONS: tuple[Option, ...] = (
    Option("gpu", "NAME", "h100", "GPU: a100, h100, h200, b200 ..."),
    Option("gpus", "N", "1", "GPUs in all."),
    Option("tp", "N", "1", "Tensor parallel size."),
    Option("pp", "N", "1", "Pipeline parallel size."),
    Option("mfu", "SHARE", "0.5", "Share of the GPU's peak that prefill reaches."),
    Option("calibrate", "TOKENS=TIME", "", "Take the MFU from a measured cold TTFT, such as 8192=640ms."),
    Option("compute-dtype", "DTYPE", "bf16", "What the matrix units compute in: bf16 or fp8."),
    Option("weights-dtype", "DTYPE", "bf16", "How weights are stored: bf16, fp8, awq-int4 ..."),
    Option("kv-dtype", "DTYPE", "bfloat16", "How the KV cache is stored: bfloat16, fp8, nvfp4 ..."),
    Option("compression", "RATIO", "1", "By how much a codec shrinks KV between tiers."),
    Option("params", "COUNT", "", "Parameters, where they cannot be counted."),
    Option("active-params", "COUNT", "", "Parameters that one token uses."),
    Option("hbm-use", "SHARE", "0.9", "Share of GPU memory that the engine takes."),
    Option("hbm-reserve", "SIZE", "2GiB", "Of it, per GPU, for activations and CUDA graphs."),
    Option("pcie-efficiency", "SHARE", "0.8", "Share of PCIe's theoretical rate that copies reach."),
    Option("host-ram", "SIZE", "", "Most RAM for the cache, all hosts together."),
    Option("disk", "LINK", "nvme", "The tier below RAM: nvme, 10gbe, 25gbe, 100gbe or s3."),
    Option("disk-rate", "SIZE/s", "", "Its rate where it is another, such as 12GB/s."),
    Option("disk-size", "SIZE", "", "Most bytes on it, all hosts together."),
    Option("sessions", "N", "100", "Sessions alive at a time."),
    Option("context", "TOKENS", "8192", "Prompt of a turn, history included."),
    Option("new", "TOKENS", "512", "Of it, new in this turn."),
    Option("output", "TOKENS", "256", "Answer of a turn."),
    Option("turns", "N", "8", "Turns of a session."),
    Option("idle", "TIME", "60s", "From the start of a session's turn to its next."),
    Option("shared", "TOKENS", "0", "Prefix that all sessions share."),
    Option("gpu-price", "AMOUNT@DATE", "", "Per GPU and hour, such as 3.50@2026-05."),
    Option("ram-price", "AMOUNT@DATE", "", "Per GB (1e9 bytes) of RAM and month."),
    Option("disk-price", "AMOUNT@DATE", "", "Per GB (1e9 bytes) of disk and month."),
)
DEFAULTS: dict[str, str] = {option.name: option.default for option in OPTIONS}


def request_from(
    model_name: str,
    given: Mapping[str, str],
    traffic: Traffic | None = None,
    opener: ModelOpener = load_model,
) -> PlanRequest:
    """The request that these texts ask for; what is absent or empty has its default.

    `traffic` (from a trace) replaces the traffic options; `opener` is what opens the model. Raises
    ConfigError or GeometryError, one line.
    """
    for name in given:
        if name not in DEFAULTS:
            near = get_close_matches(name, DEFAULTS, n=1)
            raise ConfigError(
                f"unknown option {name[:60]!r}" + (f"; did you mean '{near[0]}'?" if near else "")
            )
    texts = DEFAULTS | {name: text.strip() for name, text in given.items() if text.strip()}
    read = _Reader(texts)
    model = opener(model_name, read.real("params"), read.real("active-params"))
    gpu_named(texts["gpu"])
    link_named(texts["disk"])
    return PlanRequest(
        model=model,
        hardware=_hardware(read, model),
        traffic=_traffic(read) if traffic is None else traffic,
        prices=Prices(read.price("gpu-price"), read.price("ram-price"), read.price("disk-price")),
        storage=Storage(
            kv_dtype(texts["kv-dtype"]).name, texts["weights-dtype"], read.required("compression")
        ),
    )


def _hardware(read: _Reader, model: PlanModel) -> Hardware:
    gpu, compute_dtype, tp = read.texts["gpu"], read.texts["compute-dtype"], read.whole("tp")
    mfu = read.required("mfu")
    measured = read.calibration("calibrate")
    if measured is not None:
        cost = model_cost(model, kv_dtype(read.texts["kv-dtype"]))
        mfu = calibrated_mfu(cost, gpu_named(gpu).flops_for(compute_dtype), max(tp, 1), *measured)
    return Hardware(
        gpu=gpu,
        gpus=read.whole("gpus"),
        tp=tp,
        pp=read.whole("pp"),
        mfu=mfu,
        compute_dtype=compute_dtype,
        hbm_use=read.required("hbm-use"),
        hbm_reserve_bytes=read.size("hbm-reserve") or 0,
        pcie_efficiency=read.required("pcie-efficiency"),
        ram_limit_bytes=read.size("host-ram"),
        disk=read.texts["disk"],
        disk_bytes_per_s=read.rate("disk-rate"),
        disk_limit_bytes=read.size("disk-size"),
    )


def _traffic(read: _Reader) -> Traffic:
    return Traffic(
        sessions=read.required("sessions"),
        context_tokens=read.whole("context"),
        new_tokens=read.whole("new"),
        output_tokens=read.whole("output"),
        turns=read.required("turns"),
        idle_s=read.time("idle"),
        shared_tokens=read.whole("shared"),
    )


class _Reader:
    """Typed values of named texts; every complaint names the option."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts

    def real(self, name: str) -> float | None:
        text = self.texts[name]
        if not text:
            return None
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{name}: {text[:60]!r}; accepted: a number") from None

    def required(self, name: str) -> float:
        value = self.real(name)
        if value is None:
            raise ConfigError(f"{name}: missing; accepted: a number")
        return value

    def whole(self, name: str) -> int:
        text = self.texts[name]
        try:
            if len(text) > WHOLE_CHARS_MAX:
                raise ValueError
            return int(text)
        except ValueError:
            raise ConfigError(
                f"{name}: {text[:60]!r}; accepted: a whole number of up to {WHOLE_CHARS_MAX} digits"
            ) from None

    def size(self, name: str) -> int | None:
        text = self.texts[name]
        if not text:
            return None
        return self._named(name, lambda: parse_bytes(text))

    def rate(self, name: str) -> float | None:
        text = self.texts[name]
        if not text:
            return None
        if not text.endswith("/s"):
            raise ConfigError(f"{name}: {text[:60]!r}; accepted: a size per second, such as 12GB/s")
        return self._named(name, lambda: float(parse_bytes(text.removesuffix("/s"))))

    def time(self, name: str) -> float:
        return self._named(name, lambda: parse_seconds(self.texts[name]))

    def price(self, name: str) -> Price | None:
        text = self.texts[name]
        if not text:
            return None
        amount, at, date = text.partition("@")
        if not at or not _DATE.fullmatch(date):
            raise ConfigError(f"{name}: {text[:60]!r}; accepted: a price and its date, such as 3.50@2026-05")
        try:
            return Price(float(amount), date)
        except ValueError:
            raise ConfigError(
                f"{name}: {amount[:60]!r} is no price; accepted: such as 3.50@2026-05"
            ) from None

    def calibration(self, name: str) -> tuple[int, float] | None:
        text = self.texts[name]
        if not text:
            return None
        match = _CALIBRATION.fullmatch(text)
        if match is None:
            raise ConfigError(f"{name}: {text[:60]!r}; accepted: prompt tokens and time, such as 8192=640ms")
        return int(match[1]), self._named(name, lambda: parse_seconds(match[2]))

    def _named(self, name: str, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except ConfigError as error:
            raise ConfigError(f"{name}: {' '.join(str(error).split())}") from None
