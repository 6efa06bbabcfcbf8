"""What each way to need less KV memory would give on this model: one table, one sheet.

Every row is the planner's own sheet with a few inputs changed; nothing is a rule of thumb. It says what a
row costs in quality or training, and never that a lossy row is free. A row that the model cannot have
stands there with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from tiercel.errors import ConfigError, GeometryError
from tiercel.geometry import GroupKind, kv_dtype
from tiercel.geometry.load import text_part
from tiercel.plan.planner_formulas import SHEET
from tiercel.plan.planner_inputs import Hardware, PlanRequest, Storage, sheet_inputs
from tiercel.plan.planner_model import changed_config, model_from_config, query_heads_of
from tiercel.plan.planner_sheet import Scope
from tiercel.plan.weights import weight_format

WINDOW_TOKENS = 4096
Numbers = dict[str, float]

EXACT = "exact"
LOSSY = "approximate"
TRAINED = "must be trained so"


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One strategy. Numbers are None where it does not apply, and `reason` then says why.

    `sessions_held` counts sessions that need no recompute when they return, wherever their KV is.
    """

    name: str
    effect: str
    reason: str = ""
    kv_bytes_per_token: float | None = None
    session_bytes: float | None = None
    hbm_sessions_per_gpu: float | None = None
    sessions_held: float | None = None
    ttft_cold_s: float | None = None
    ttft_mean_s: float | None = None
    sessions_per_gpu: float | None = None
    cost_per_million: float | None = None


def numbers_of(request: PlanRequest) -> Numbers:
    """The sheet's inputs as plain numbers."""
    return {name: entry.value for name, entry in sheet_inputs(request).items()}


def compare(request: PlanRequest) -> tuple[StrategyRow, ...]:
    """Every strategy on this request. Raises ConfigError or GeometryError for a bad request only."""
    rows = [_row("as it is", EXACT, numbers_of(request), offload=False)]
    rows += _heads(request)
    rows.append(_window(request))
    rows += _kv_formats(request)
    rows += _weights(request)
    rows += _more_gpus(request)
    rows += _offload(request)
    return tuple(rows)


def _row(name: str, effect: str, inputs: Numbers, offload: bool) -> StrategyRow:
    if not offload:
        inputs = inputs | {"ram_limit_bytes": 0.0, "disk_limit_bytes": 0.0}
    scope = SHEET.bind(inputs)
    if scope["hbm_kv_bytes"] < 0:
        return StrategyRow(name, effect, "the weights do not fit these GPUs", scope["kv_token_bytes"])
    cost = scope["cost_with"]
    return StrategyRow(
        name=name,
        effect=effect,
        kv_bytes_per_token=scope["kv_token_bytes"],
        session_bytes=scope["session_kv_bytes"],
        hbm_sessions_per_gpu=scope["hbm_sessions_per_gpu"],
        sessions_held=_held(scope),
        ttft_cold_s=scope["ttft_recompute_s"],
        ttft_mean_s=scope["ttft_with_s"],
        sessions_per_gpu=scope["sessions_per_gpu_with"],
        cost_per_million=cost if cost == cost else None,
    )


def _held(scope: Scope) -> float:
    share = scope["hbm_share"] + scope["ram_share"] + scope["disk_share"]
    return share * scope["sessions"]


def _attempt(
    name: str, effect: str, request: Callable[[], PlanRequest], offload: bool = False
) -> StrategyRow:
    try:
        return _row(name, effect, numbers_of(request()), offload)
    except (GeometryError, ConfigError) as error:
        return StrategyRow(name, effect, str(error))


def _heads(request: PlanRequest) -> Iterator[StrategyRow]:
    model = request.model
    kinds = {group.kind for group in model.geometry.groups}
    full = next((g for g in model.geometry.groups if g.kind is GroupKind.FULL), None)
    if GroupKind.LATENT in kinds or full is None:
        why = "its latent serves all heads" if GroupKind.LATENT in kinds else "no layer keeps plain KV heads"
        yield StrategyRow("GQA, MQA", TRAINED, f"does not apply: {why}")
        return
    _, fields = text_part(model.name, model.config)
    heads = query_heads_of(fields, full)
    for kv_heads, name in (
        (heads, "MHA"),
        (8, "GQA, 8 KV heads"),
        (4, "GQA, 4 KV heads"),
        (1, "MQA, 1 KV head"),
    ):
        if kv_heads == full.kv_heads or kv_heads > heads or heads % kv_heads:
            continue
        yield _attempt(name, TRAINED, partial(_with_heads, request, kv_heads))


def _with_heads(request: PlanRequest, kv_heads: int) -> PlanRequest:
    model = request.model
    config = changed_config(model, {"num_key_value_heads": kv_heads})
    counted = model.parameters.how.endswith("left out")
    changed = model_from_config(
        model.name,
        config,
        model.source,
        None if counted else float(model.parameters.total),
        None if counted else float(model.active.total),
    )
    if changed.geometry.groups == model.geometry.groups:
        raise ConfigError("this architecture's configuration has no number of KV heads")
    return replace(request, model=changed)


def _window(request: PlanRequest) -> StrategyRow:
    name = f"sliding window of {WINDOW_TOKENS} everywhere"
    inputs = numbers_of(request)
    if inputs["kv_window_token_bytes"] or inputs["attn_window_flops"]:
        return StrategyRow(name, TRAINED, "does not apply: some layers already see a window")
    changed = {
        "kv_token_bytes": 0.0,
        "kv_window_token_bytes": inputs["kv_token_bytes"],
        "kv_window_tokens": float(WINDOW_TOKENS),
        "attn_full_flops": 0.0,
        "attn_window_flops": inputs["attn_full_flops"],
        "attn_window_tokens": float(WINDOW_TOKENS),
        "rank_token_bytes": 0.0,
        "rank_window_token_bytes": inputs["rank_token_bytes"],
    }
    row = _row(name, TRAINED, inputs | changed, offload=False)
    return replace(row, kv_bytes_per_token=inputs["kv_token_bytes"])


def _kv_formats(request: PlanRequest) -> Iterator[StrategyRow]:
    latent = any(group.kind is GroupKind.LATENT for group in request.model.geometry.groups)
    names = ("fp8_ds_mla", "nvfp4_ds_mla") if latent else ("fp8", "int4_per_token_head", "nvfp4")
    here = kv_dtype(request.storage.kv_dtype)
    for name in names:
        if kv_dtype(name) != here:
            yield _attempt(f"KV cache in {name}", LOSSY, partial(_stored, request, kv_dtype=name))


def _stored(request: PlanRequest, **changes: str) -> PlanRequest:
    storage: Storage = replace(request.storage, **changes)  # type: ignore[arg-type]  # only text fields
    return replace(request, storage=storage)


def _weights(request: PlanRequest) -> Iterator[StrategyRow]:
    here = weight_format(request.storage.weights)
    for name in ("fp8", "awq-int4"):
        if weight_format(name).bits_per_parameter() < here.bits_per_parameter():
            yield _attempt(f"weights in {name}", LOSSY, partial(_stored, request, weights=name))


def _more_gpus(request: PlanRequest) -> Iterator[StrategyRow]:
    hardware = request.hardware
    for name, tp, pp in (
        (f"tensor parallel {hardware.tp * 2}", hardware.tp * 2, hardware.pp),
        (f"pipeline parallel {hardware.pp * 2}", hardware.tp, hardware.pp * 2),
    ):
        wider: Hardware = replace(hardware, tp=tp, pp=pp, gpus=max(hardware.gpus, tp * pp))
        yield _attempt(name, EXACT, partial(replace, request, hardware=wider))


def _offload(request: PlanRequest) -> Iterator[StrategyRow]:
    inputs = numbers_of(request)
    yield _row("Tiercel: RAM", EXACT, inputs | {"disk_limit_bytes": 0.0}, offload=True)
    yield _row("Tiercel: RAM and disk", EXACT, inputs, offload=True)
    latent = any(group.kind is GroupKind.LATENT for group in request.model.geometry.groups)
    small = "fp8_ds_mla" if latent else "fp8"
    if kv_dtype(small) != kv_dtype(request.storage.kv_dtype):
        yield _attempt(
            f"Tiercel: RAM and disk, KV in {small}",
            LOSSY,
            partial(_stored, request, kv_dtype=small),
            offload=True,
        )
