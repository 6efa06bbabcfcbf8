"""What GPUs and links can do, as published: a dated table with its sources.

It never claims a measurement: every figure is a data sheet's or an assumption, says which, and can be
replaced by the reader's own. Bandwidths are in one direction, bytes are decimal unless the name says GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from tiercel.errors import ConfigError

TABLE_DATE = "2026-11"
GPU_SOURCE = "aiconfigurator-core 0.12.0 (NVIDIA), systems/*.yaml: dense FLOP/s, bytes/s in one direction"
GIB = 1024**3
DEFAULT_MFU = 0.5
DEFAULT_PCIE_EFFICIENCY = 0.8


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `flops` maps a compute dtype to dense FLOP/s; bandwidths in bytes/s."""

    name: str
    title: str
    flops: Mapping[str, float]
    hbm_bytes: int
    hbm_bytes_per_s: float
    pcie_bytes_per_s: float
    source: str = GPU_SOURCE

    def flops_for(self, dtype: str) -> float:
        """Dense FLOP/s for `dtype`, or for bf16 where the GPU has no units for it."""
        return self.flops.get(dtype, self.flops["bf16"])


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between a tier and a GPU.

    `per` says who shares it: every GPU has its own (`gpu`), or all GPUs of a host share one (`host`).
    """

    name: str
    title: str
    bytes_per_s: float
    latency_s: float
    per: Literal["gpu", "host"]
    assumption: str


def _gpu(name: str, title: str, bf16: float, fp8: float | None, hbm: tuple[float, int], pcie: float) -> Gpu:
    flops = {"bf16": bf16 * 1e12} | ({"fp8": fp8 * 1e12} if fp8 else {})
    return Gpu(name, title, flops, hbm[1] * GIB, hbm[0] * 1e9, pcie * 1e9)


# name, title, bf16 TFLOP/s, fp8 TFLOP/s, (HBM GB/s, GiB), PCIe GB/s
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", "A100 SXM 80 GB", 312, None, (2039, 80), 32),
        # The A100's chip and memory; only its links between GPUs, which nothing here counts, are slower.
        _gpu("a800", "A800 SXM 80 GB", 312, None, (2039, 80), 32),
        _gpu("h100", "H100 SXM 80 GB", 989, 1978, (3350, 80), 64),
        _gpu("h200", "H200 SXM 141 GB", 989, 1978, (4800, 141), 64),
        _gpu("b200", "B200 SXM 180 GB", 2250, 4500, (7700, 180), 128),
        _gpu("b300", "B300 SXM 269 GB", 2250, 4500, (7750, 269), 128),
        _gpu("gb200", "GB200", 2500, 5000, (8000, 185), 64),
        _gpu("gb300", "GB300", 2500, 5000, (8000, 278), 64),
        _gpu("l40s", "L40S 48 GB", 362, 733, (864, 45), 32),
        _gpu("l4", "L4 24 GB", 121, 242, (300, 24), 32),
    )
}

# Links other than PCIe. Rates are what a good client gets, not the line rate.
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvme", "NVMe SSD", 6e9, 200e-6, "host", "one PCIe 4 drive, large direct reads: 6 GB/s, 200 us"),
        Link("10gbe", "10 GbE", 1.1e9, 1e-3, "host", "1.25 GB/s line rate, 88 % of it used, 1 ms"),
        Link("25gbe", "25 GbE", 2.75e9, 1e-3, "host", "3.125 GB/s line rate, 88 % of it used, 1 ms"),
        Link("100gbe", "100 GbE", 11e9, 1e-3, "host", "12.5 GB/s line rate, 88 % of it used, 1 ms"),
        Link(
            "s3",
            "S3-like object store",
            1e9,
            30e-3,
            "host",
            "1 GB/s in parallel parts, 30 ms to first byte",
        ),
    )
}


def ram_link(gpu: Gpu, efficiency: float = DEFAULT_PCIE_EFFICIENCY) -> Link:
    """Host memory over the GPU's own PCIe link, at `efficiency` of its theoretical rate."""
    rate = gpu.pcie_bytes_per_s
    told = f"{rate / 1e9:g} GB/s theoretical, {efficiency:.0%} of it used, 20 us"
    return Link("ram", f"RAM over PCIe ({gpu.name})", rate * efficiency, 20e-6, "gpu", told)


def gpu_named(name: str) -> Gpu:
    """The GPU of that name (any case). Raises ConfigError naming the nearest one."""
    key = name.strip().lower().removeprefix("nvidia").strip(" -_")
    if key in GPUS:
        return GPUS[key]
    raise ConfigError(f"unknown GPU {name[:60]!r}{_nearest(key, GPUS)}")


def link_named(name: str) -> Link:
    """The link of that name (any case). Raises ConfigError naming the nearest one."""
    key = name.strip().lower()
    if key in LINKS:
        return LINKS[key]
    raise ConfigError(f"unknown link {name[:60]!r}{_nearest(key, LINKS)}")


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    listed = ", ".join(known)
    return f"; did you mean '{near[0]}'? Known: {listed}" if near else f"; known: {listed}"
