"""From a model's configuration to the numbers that the planner's formulas take.

KV sizes come from the geometry and weights from `tiercel.plan.weights`, never from here; this module adds
what prefill FLOPs need: active parameters, query heads and head sizes of every attention layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.errors import ConfigError
from tiercel.geometry import GroupKind, KVDtype, KVGeometry, LayerGroup
from tiercel.geometry.engines import Engine
from tiercel.geometry.fields import Fields
from tiercel.geometry.load import read_config, text_part
from tiercel.geometry.shapes import CONTEXT_NAMES, HEAD_NAMES
from tiercel.plan.breakeven import ModelCost
from tiercel.plan.catalogue import open_model
from tiercel.plan.parallel import Parallel
from tiercel.plan.size import measure
from tiercel.plan.weights import Parameters, WeightFormat, count_parameters

EXPERT_NAMES = ("n_routed_experts", "num_experts", "num_local_experts")
ACTIVE_NAMES = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
# Where a configuration does not say: the default of the model type's published configuration class.
EXPERTS_PER_TOKEN: Mapping[str, int] = {
    "mixtral": 2, "qwen3_moe": 8, "deepseek_v3": 8, "deepseek_v32": 8, "kimi_k2": 8,
    "glm4_moe": 8, "glm_moe_dsa": 8, "gpt_oss": 4, "minimax_m2": 8, "olmoe": 8, "llama4_text": 1,
}  # fmt: skip
_GIVEN, _NAMED = "given", "read off the model's name"
_NOT_COUNTED = (_GIVEN, _NAMED)
_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)B(?:-?A(\d+(?:\.\d+)?)B)?(?![\w.])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PlanModel:
    """A model as the planner sees it. `attention` is (FLOPs per token pair, window or None) per group.

    `max_tokens` is the context limit where the configuration itself states one.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    geometry: KVGeometry
    parameters: Parameters
    active: Parameters
    attention: tuple[tuple[float, int | None], ...]
    assumptions: tuple[str, ...]
    max_tokens: int | None = None


def load_model(name: str, params: float | None = None, active_params: float | None = None) -> PlanModel:
    """The model that `name` means: a file, a folder or a built-in name.

    `params` and `active_params` replace what is counted. Raises GeometryError, or ConfigError where the
    parameters can neither be counted nor read off the name.
    """
    title, found, source = open_model(name)
    return model_from_config(title, found, source, params, active_params)


def model_from_config(
    title: str,
    found: Path | str | Mapping[str, Any],
    source: str,
    params: float | None = None,
    active_params: float | None = None,
) -> PlanModel:
    """As `load_model`, from a configuration or its path."""
    label, config = read_config(found)
    geometry = KVGeometry.from_config(config if isinstance(found, Mapping) else found)
    _, fields = text_part(label, config)
    total, active, told = _parameters(title, label, config, fields, params, active_params)
    attention = tuple(_attention(fields, geometry, group) for group in geometry.groups)
    notes = [told, "embedding tables counted as computed with"]
    if any(group.kind is GroupKind.STATE for group in geometry.groups):
        notes.append("recurrent layers' own FLOPs are part of 2 per parameter")
    if len({window for _, window in attention if window}) > 1:
        notes.append("several windows are counted as the widest")
    return PlanModel(
        name=title,
        source=source,
        config=config,
        geometry=geometry,
        parameters=total,
        active=active,
        attention=tuple((flops, window) for flops, window in attention if flops),
        assumptions=tuple(notes),
        max_tokens=geometry.max_tokens if any(fields.values.get(n) for n in CONTEXT_NAMES) else None,
    )


def _parameters(
    title: str,
    label: str,
    config: Mapping[str, Any],
    fields: Fields,
    params: float | None,
    active_params: float | None,
) -> tuple[Parameters, Parameters, str]:
    for flag, value in (("--params", params), ("--active-params", active_params)):
        if value is not None and not 1e6 <= value <= 1e14:
            raise ConfigError(f"{flag}: {value:g}; accepted: a count from 1e6 to 1e14, such as 70e9")
    counted = None if params is not None else count_parameters(label, config)
    named = _IN_NAME.search(title.rpartition("/")[2])
    told = "parameters counted from the configuration"
    if counted is None:
        if params is None and named is None:
            raise ConfigError(
                f"{title}: its parameters cannot be counted from the configuration; give --params "
                "(and --active-params for a mixture of experts), such as --params 70e9"
            )
        size = params if params is not None else float(named[1]) * 1e9 if named else 0.0
        counted = Parameters(round(size), 0, _GIVEN if params is not None else _NAMED)
        told = f"parameters {counted.how}"
    if active_params is not None:
        return counted, Parameters(round(active_params), 0, _GIVEN), told + ", active ones given"
    active = _counted_active(label, config, fields) if counted.how not in _NOT_COUNTED else None
    if active is not None:
        return counted, active, told
    if named is not None and named[2] is not None:
        active = Parameters(round(float(named[2]) * 1e9), 0, _NAMED)
        return counted, active, told + ", active ones read off its name"
    experts = fields.optional(*EXPERT_NAMES) or 1
    if experts > 1:
        raise ConfigError(f"{title}: a mixture of {experts} experts; give --active-params, such as 37e9")
    return counted, counted, told


def _counted_active(label: str, config: Mapping[str, Any], fields: Fields) -> Parameters | None:
    """Parameters that one token uses: the same count with as many experts as it is sent to."""
    name = next((n for n in EXPERT_NAMES if fields.optional(n) is not None), None)
    if name is None:
        return count_parameters(label, config)
    model_type, _ = text_part(label, config)
    chosen = fields.optional(*ACTIVE_NAMES) or EXPERTS_PER_TOKEN.get(model_type)
    if chosen is None:
        return None
    return count_parameters(label, _with_field(config, fields, {name: chosen}))


def _with_field(config: Mapping[str, Any], fields: Fields, changed: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with fields of its text part replaced, wherever that part is nested."""
    path = [part for part in fields.path.split(".") if part]
    return _replaced(config, path, changed)


def _replaced(config: Mapping[str, Any], path: list[str], changed: Mapping[str, Any]) -> dict[str, Any]:
    if not path:
        return {**config, **changed}
    return {**config, path[0]: _replaced(config[path[0]], path[1:], changed)}


def changed_config(model: PlanModel, changed: Mapping[str, Any]) -> dict[str, Any]:
    """The model's configuration with fields of its text part replaced."""
    _, fields = text_part(model.name, model.config)
    return _with_field(model.config, fields, changed)


def query_heads_of(fields: Fields, group: LayerGroup) -> int:
    """Query heads of the layers of `group`."""
    if group.window_tokens is not None and fields.optional("swa_num_attention_heads"):
        return fields.count("swa_num_attention_heads")
    return fields.optional(*HEAD_NAMES, "decoder_attention_heads") or max(group.kv_heads, 1)


def _attention(fields: Fields, geometry: KVGeometry, group: LayerGroup) -> tuple[float, int | None]:
    """(FLOPs per pair of tokens over all layers of the group, window or None)."""
    layers, heads = len(group.layers), query_heads_of(fields, group)
    if group.kind in (GroupKind.STATE, GroupKind.CROSS):
        return 0.0, None
    if group.kind is GroupKind.INDEX:
        width = (fields.optional("index_n_heads") or 1) * group.key_dim
        return 2.0 * layers * width / group.tokens_per_entry, None
    if group.kind is GroupKind.LATENT and fields.optional("qk_nope_head_dim", least=0) is not None:
        key = (fields.optional("qk_nope_head_dim", least=0) or 0) + (
            fields.optional("qk_rope_head_dim", least=0) or 0
        )
        value = fields.optional("v_head_dim") or key
        # A sparse-attention indexer lets each token see a fixed number of others.
        seen = fields.optional("index_topk") if fields.optional("index_n_heads") else None
        return 2.0 * layers * heads * (key + value), seen
    if group.kind is GroupKind.SHARED:
        lender = next((g for g in geometry.groups if g.key_dim), group)
        return 2.0 * layers * heads * (lender.key_dim + lender.value_dim), lender.window_tokens
    width = group.key_dim + (group.value_dim or group.key_dim)
    return 2.0 * layers * heads * width / group.tokens_per_entry, group.window_tokens


def model_inputs(
    model: PlanModel, kv_dtype: KVDtype, weights: WeightFormat, parallel: Parallel
) -> dict[str, float]:
    """The sheet's inputs that depend on model, storage formats and parallelism. Raises ConfigError."""
    report = measure(model.geometry, kv_dtype, 0, 1, parallel, Engine.EXACT)
    share = report.share
    weight_bytes = float(weights.nbytes(model.parameters))
    cost = model_cost(model, kv_dtype)
    return {
        "active_params": cost.active_params,
        "attn_full_flops": cost.attn_full_flops,
        "attn_window_flops": cost.attn_window_flops,
        "attn_window_tokens": cost.attn_window_tokens,
        "kv_token_bytes": cost.kv_token_bytes,
        "kv_window_token_bytes": cost.kv_window_token_bytes,
        "kv_window_tokens": cost.kv_window_tokens,
        "kv_fixed_bytes": cost.kv_fixed_bytes,
        "weight_bytes": weight_bytes,
        "active_weight_bytes": float(weights.nbytes(model.active)),
        "rank_token_bytes": float(share.bytes_per_token),
        "rank_window_token_bytes": float(share.window_bytes_per_token),
        "rank_fixed_bytes": float(share.fixed_state_bytes),
    }


def model_cost(model: PlanModel, kv_dtype: KVDtype) -> ModelCost:
    """The model in the terms of the break-even formulas; every distinct byte once."""
    full = sum(flops for flops, window in model.attention if window is None)
    windowed = [(flops, window) for flops, window in model.attention if window is not None]
    geometry = model.geometry
    return ModelCost(
        active_params=float(model.active.total),
        attn_full_flops=full,
        kv_token_bytes=float(geometry.bytes_per_token_exact(kv_dtype)),
        attn_window_flops=sum(flops for flops, _ in windowed),
        attn_window_tokens=float(max((window for _, window in windowed), default=0)),
        kv_window_token_bytes=float(geometry.window_bytes_per_token_exact(kv_dtype)),
        kv_window_tokens=float(geometry.window_tokens or 0),
        kv_fixed_bytes=float(geometry.fixed_state_bytes(kv_dtype)),
    )
