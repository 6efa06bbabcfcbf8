"""From a model and a GPU, or from what the user measured, to block bytes and prefill cost.

It also words the assumptions that go with them, so that no number of the report stands alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.config import human_bytes
from tiercel.errors import ConfigError
from tiercel.geometry import KVGeometry, kv_dtype
from tiercel.plan.breakeven import Compute, ModelCost
from tiercel.plan.catalogue import open_model
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
    params: float | None = None,
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
        weight = _weight(model, kv_dtype_name, told)
        block_bytes = round(weight.bytes_per_token * block_tokens)
        state = weight.state_bytes
    else:
        block_bytes = bytes_per_token * block_tokens if bytes_per_token is not None else block_bytes
        state = 0
    if block_bytes is not None:
        left_out = f"the recurrent state ({human_bytes(state)} per snapshot) is left out; " if state else ""
        told["block"] = (
            f"{block_tokens} tokens, {human_bytes(block_bytes)}; {left_out}every block a full slot"
        )
    if model is not None and gpu is not None:
        loaded = load_model(model, params, active_params)
        cost = model_cost(loaded, kv_dtype(kv_dtype_name))
        told["model"] += "; " + "; ".join(loaded.assumptions)
    return Machine(block_bytes, _prefill(cost, gpu, mfu, tp, prefill_points, told), told)


@dataclass(frozen=True, slots=True)
class _Weight:
    bytes_per_token: float
    state_bytes: int


def _weight(model: str, kv_dtype_name: str, told: dict[str, str]) -> _Weight:
    """What a stored token of the model weighs: all layers, those with a window too."""
    title, found, source = open_model(model)
    geometry = KVGeometry.from_config(found)
    dtype = kv_dtype(kv_dtype_name)
    told["model"] = f"{title} ({source}), KV in {dtype.name}"
    per_token = geometry.bytes_per_token_exact(dtype) + geometry.window_bytes_per_token_exact(dtype)
    if not per_token:
        raise ConfigError(f"--model: '{model}' stores nothing per token; accepted: one with attention")
    return _Weight(float(per_token), geometry.fixed_state_bytes(dtype))


def _sizes(model: str | None, bytes_per_token: int | None, block_bytes: int | None) -> dict[str, object]:
    return {"--model": model, "--bytes-per-token": bytes_per_token, "--block-bytes": block_bytes}


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
