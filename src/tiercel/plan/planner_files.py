"""What a plan ends in: a `tiercel.toml` that loads as it stands, and a vLLM command line that reads it.

`VLLM_NOTE` goes with the command line wherever it is shown.
"""

from __future__ import annotations

import json
import math
import shlex

from tiercel.config import format_bytes
from tiercel.config.connector import kv_transfer_config
from tiercel.plan.planner_inputs import PlanRequest
from tiercel.plan.planner_sheet import Scope

GIB = 2**30
LEAST_BYTES = 2**30
GPUS_PER_HOST = 8
DISK_PATH = "/var/lib/tiercel/blocks"
CONFIG_FILE = "tiercel.toml"
VLLM_NOTE = f"with this {CONFIG_FILE} in the directory it is started from"

# The planner's KV formats as vLLM's --kv-cache-dtype takes them; the others are passed as they are.
_VLLM_KV = {"bfloat16": "auto", "float16": "auto", "float32": "auto", "nvfp4_ds_mla": "nvfp4_ds_mla"}
_QUANTISED = {"fp8": "fp8"}


def hosts_of(gpus: float) -> int:
    """Hosts for so many GPUs, eight to a host."""
    return math.ceil(gpus / GPUS_PER_HOST)


def config_toml(scope: Scope) -> str:
    """The recommended configuration of one host. Sizes are this host's part, in whole GiB."""
    hosts = hosts_of(scope["gpus"])
    ram, disk = (_part(scope[name], hosts) for name in ("ram_bytes", "disk_bytes"))
    lines = [
        f"# One of {hosts} host{'s' if hosts > 1 else ''}: its part of the planned tiers.",
        "[ram]",
        f'size = "{format_bytes(max(ram, LEAST_BYTES))}"',
        'kind = "shared"',
    ]
    if disk:
        lines += [
            "",
            "[[tiers]]",
            'kind = "files"',
            f'path = "{DISK_PATH}"',
            f'size = "{format_bytes(disk)}"',
        ]
    return "\n".join(lines) + "\n"


def _part(size_bytes: float, hosts: int) -> int:
    """One host's part in whole GiB, at least one unless there is none at all."""
    return 0 if size_bytes <= 0 else max(math.ceil(size_bytes / hosts / GIB), 1) * GIB


def vllm_command(request: PlanRequest) -> str:
    """How vLLM is started for this plan, with the connector and the sizes of the plan's `tiercel.toml`."""
    hardware, storage, traffic = request.hardware, request.storage, request.traffic
    transfer = kv_transfer_config({"config": CONFIG_FILE})
    words = ["vllm", "serve", request.model.name]
    if hardware.tp > 1:
        words += ["--tensor-parallel-size", str(hardware.tp)]
    if hardware.pp > 1:
        words += ["--pipeline-parallel-size", str(hardware.pp)]
    words += ["--gpu-memory-utilization", f"{hardware.hbm_use:g}"]
    words += ["--max-model-len", str(traffic.context_tokens + traffic.output_tokens)]
    kv = _VLLM_KV.get(storage.kv_dtype, storage.kv_dtype)
    if kv != "auto":
        words += ["--kv-cache-dtype", kv]
    if storage.weights in _QUANTISED:
        words += ["--quantization", _QUANTISED[storage.weights]]
    words += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    return " ".join(shlex.quote(word) for word in words)
