"""What the planner is made of: the choices of its form, and the numbers of the page without a server.

Every number comes from the planner. The written page gets per-model coefficients computed here and the
planner's own sheet printed as JavaScript; it has no formulas of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from tiercel import __version__
from tiercel.errors import GeometryError, TiercelError
from tiercel.geometry import kv_dtype
from tiercel.plan import hardware
from tiercel.plan.catalogue import find_model, models
from tiercel.plan.parallel import Parallel
from tiercel.plan.planner import BREAK_EVEN_TOKENS, DISK_LOAD_MOST, as_json, make_plan
from tiercel.plan.planner_formulas import SHEET
from tiercel.plan.planner_inputs import BOUNDS, Hardware
from tiercel.plan.planner_model import PlanModel, load_model, model_inputs
from tiercel.plan.planner_options import OPTIONS, request_from
from tiercel.plan.planner_sheet import JAVASCRIPT_PRELUDE
from tiercel.plan.weights import weight_format

PAGE = "plan.html"
FILES = ("plan.css", "plan.js")
DATA_FILE = "data.js"
KV_DTYPES = ("bfloat16", "fp8", "int4_per_token_head", "nvfp4", "fp8_ds_mla")
WEIGHTS = ("bf16", "fp8", "awq-int4")
TP = (1, 2, 4, 8, 16)
PP = (1, 2, 4)
DEFAULT_MODEL = "meta-llama/Meta-Llama-3.1-70B"
# Inputs that depend on how the KV is stored and split, in the order of the embedded table.
KV_INPUTS = (
    "kv_token_bytes",
    "kv_window_token_bytes",
    "kv_fixed_bytes",
    "rank_token_bytes",
    "rank_window_token_bytes",
    "rank_fixed_bytes",
)
WEIGHT_INPUTS = ("weight_bytes", "active_weight_bytes")


@lru_cache(maxsize=256)
def built_in(name: str, params: float | None = None, active_params: float | None = None) -> PlanModel:
    """A built-in model by name. It opens no path, because its names come from a browser.

    Raises GeometryError for other names, ConfigError where the parameters cannot be counted.
    """
    found = find_model(name)
    if found is None:
        raise GeometryError(f"model: '{name:.80}' is not built in; accepted: a name of the page's list")
    return load_model(found.name, params, active_params)


@lru_cache(maxsize=1)
def plannable() -> tuple[PlanModel, ...]:
    """The built-in models whose parameters are known without being told."""
    found = []
    for name in models():
        try:
            found.append(built_in(name))
        except TiercelError:
            continue  # a model without a parameter count needs --params, which the page does not ask for
    return tuple(sorted(found, key=lambda model: model.name.lower()))


def plan_json(given: Mapping[str, str]) -> dict[str, Any]:
    """The plan for a query: the options of `tiercel plan` and `model`. Raises TiercelError, one line."""
    options = dict(given)
    name = options.pop("model", "") or DEFAULT_MODEL
    return as_json(make_plan(request_from(name, options, opener=built_in)))


def choices() -> dict[str, Any]:
    """What the form offers, with the defaults of the command line."""
    return {
        "version": __version__,
        "table_date": hardware.TABLE_DATE,
        "defaults": {option.name: option.default for option in OPTIONS}
        | {"model": DEFAULT_MODEL, "gpus": "4", "tp": "4", "sessions": "200"},
        "help": {option.name: option.help for option in OPTIONS},
        "models": [model.name for model in plannable()],
        "max_tokens": {model.name: model.max_tokens for model in plannable()},
        "gpus": {gpu.name: gpu.title for gpu in hardware.GPUS.values()},
        "links": {link.name: link.title for link in hardware.LINKS.values()},
        "kv_dtypes": list(KV_DTYPES),
        "weights": list(WEIGHTS),
        "tp": list(TP),
        "pp": list(PP),
        "cells": {
            cell.name: [cell.unit, cell.formula, cell.assumption]
            for cell in SHEET.cells.values()
            if not cell.params
        },
    }


def coefficients(model: PlanModel) -> dict[str, Any]:
    """The model's sheet inputs for every choice of the form; a split that it cannot have is left out."""
    weights = {}
    base: dict[str, float] = {}
    kv: dict[str, dict[str, list[float]]] = {}
    for name in WEIGHTS:
        base = model_inputs(model, kv_dtype("bfloat16"), weight_format(name), Parallel())
        weights[name] = [base[key] for key in WEIGHT_INPUTS]
    for dtype in KV_DTYPES:
        for tp in TP:
            for pp in PP:
                try:
                    found = model_inputs(model, kv_dtype(dtype), weight_format("bf16"), Parallel(tp, pp))
                except TiercelError:
                    continue  # this format or split does not exist for the model, and the page says so
                kv.setdefault(dtype, {})[f"{tp}x{pp}"] = [found[key] for key in KV_INPUTS]
    same = {key: value for key, value in base.items() if key not in (*KV_INPUTS, *WEIGHT_INPUTS)}
    return {"same": same, "weights": weights, "kv": kv}


def data_script(*, static: bool = False, live: bool = False) -> str:
    """`data.js`: the form's choices, and with `static` all that the page needs to plan by itself.

    `live`: whether the site has figures of a running store to show as well.
    """
    told = choices() | {"static": static, "live": live}
    lines = ['"use strict";', f"const TIERCEL = {_json(told)};"]
    if static:
        links = {link.name: asdict(link) for link in hardware.LINKS.values()}
        gpus = {
            name: {"hbm_bytes": float(gpu.hbm_bytes), "hbm_bytes_per_s": gpu.hbm_bytes_per_s,
                   "gpu_flops": gpu.flops["bf16"], "ram": asdict(hardware.ram_link(gpu))}
            for name, gpu in hardware.GPUS.items()
        }  # fmt: skip
        offline = {
            "models": {model.name: coefficients(model) for model in plannable()},
            "gpus": gpus,
            "links": links,
            "hbm_efficiency": Hardware().hbm_efficiency,
            "kv_inputs": KV_INPUTS,
            "weight_inputs": WEIGHT_INPUTS,
            "break_even_tokens": BREAK_EVEN_TOKENS,
            "bounds": BOUNDS,
            "disk_load_most": DISK_LOAD_MOST,
        }
        lines += [f"TIERCEL.offline = {_json(offline)};", JAVASCRIPT_PRELUDE, SHEET.to_javascript("sheet")]
    return "\n".join(lines) + "\n"


def _json(value: object) -> str:
    # `</script>` inside a string would end the script element if the file were inlined.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
