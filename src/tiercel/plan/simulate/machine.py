"""From a model and a GPU, or from what the user measured, to block bytes and prefill cost.

It also words the assumptions that go with them, so that no number of the report stands alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.config import human_bytes
from tiercel.errors import ConfigError
from tiercel.geometry import kv_dtype
from tiercel.plan.breakeven import Compute, ModelCost
from tiercel.plan.hardware import DEFAULT_MFU, gpu_named
from tiercel.plan.planner_model import load_model, model_cost
from tiercel.plan.simulate.costs import PrefillCost
from tiercel.plan.simulate.parse import fit_prefill


@dataclass(frozen=True, slots=True)
class Machine:
    """What a block weighs and what prefill costs; None where nothing was said about it."""

    block_bytes: int | None
    prefill: PrefillCost | None
    assumptions: dict[str, str]


def machine_of(
    block_tokens: int,
    *,
    model: str | None = None,
    kv_dtype_name: str = "bfloat16",
    active_params: float | None = None,
    bytes_per_token: int | None = None,
    block_bytes: int | None = None,
    gpu: str | None = None,
    mfu: float = DEFAULT_MFU,
    tp: int = 1,
    prefill_points: tuple[str, ...] = (),
) -> Machine:
    """Return what the flags say. Raises ConfigError or GeometryError where they contradict each other."""
    given = [name for name, value in _sizes(model, bytes_per_token, block_bytes).items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both say how large a block is; accepted: one of them")
    if gpu is not None and prefill_points:
        raise ConfigError("--gpu and --prefill both say how long prefill takes; accepted: one of them")
    if gpu is not None and model is None:
        raise ConfigError(f"--gpu {gpu} needs --model, whose FLOPs it computes; accepted: both, or --prefill")
    told: dict[str, str] = {}
    cost: ModelCost | None = None
    if model is not None:
        loaded = load_model(model, active_params=active_params)
        cost = model_cost(loaded, kv_dtype(kv_dtype_name))
        told["model"] = f"{loaded.name} ({loaded.source}); {'; '.join(loaded.assumptions)}"
        block_bytes = _block_bytes(cost, block_tokens, model)
    elif bytes_per_token is not None:
        block_bytes = bytes_per_token * block_tokens
    if block_bytes is not None:
        told["block"] = (
            f"{block_tokens} tokens, {human_bytes(block_bytes)}; {_left_out(cost)}every block a full slot"
        )
    return Machine(block_bytes, _prefill(cost, gpu, mfu, tp, prefill_points, told), told)


def _sizes(model: str | None, bytes_per_token: int | None, block_bytes: int | None) -> dict[str, object]:
    return {"--model": model, "--bytes-per-token": bytes_per_token, "--block-bytes": block_bytes}


def _block_bytes(cost: ModelCost, block_tokens: int, model: str) -> int:
    per_token = cost.kv_token_bytes + cost.kv_window_token_bytes
    if not per_token:
        raise ConfigError(f"--model: '{model}' stores nothing per token; accepted: one with attention")
    return round(per_token * block_tokens)


def _left_out(cost: ModelCost | None) -> str:
    if cost is None or not cost.kv_fixed_bytes:
        return ""
    return f"the recurrent state ({human_bytes(cost.kv_fixed_bytes)} per snapshot) is left out; "


def _prefill(
    cost: ModelCost | None,
    gpu: str | None,
    mfu: float,
    tp: int,
    points: tuple[str, ...],
    told: dict[str, str],
) -> PrefillCost | None:
    if points:
        told["prefill"] = f"fitted to {', '.join(points)}: linear and quadratic term, neither below zero"
        return fit_prefill(points)
    if gpu is None or cost is None:
        return None
    found = gpu_named(gpu)
    flops = found.flops_for("bf16")
    told["prefill"] = (
        f"{tp} × {found.title} at {mfu:.0%} of {flops / 1e12:g} TFLOP/s (bf16, dense); causal attention"
    )
    return PrefillCost.of_model(cost, Compute(flops, mfu, tp))
