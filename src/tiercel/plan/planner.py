"""The planner: one request in, one plan out, in which every number carries its formula and its assumption.

It evaluates the sheet, the break-even table and the strategies, and writes the two files one would
otherwise write by hand. It measures nothing and promises nothing: a plan is arithmetic on its inputs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tiercel.plan.hardware import LINKS, Link, gpu_named, ram_link
from tiercel.plan.planner_files import VLLM_NOTE, config_toml, vllm_command
from tiercel.plan.planner_formulas import SHEET
from tiercel.plan.planner_inputs import Input, PlanRequest, disk_of, sheet_inputs
from tiercel.plan.planner_sheet import Scope
from tiercel.plan.strategies import StrategyRow, compare

DISK_LOAD_MOST = 0.7  # beyond it waiting in the queue is no longer short against reading
BREAK_EVEN_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a plan: None where it has no finite value (never, or a price not given)."""

    value: float | None
    unit: str
    formula: str
    assumptions: str


@dataclass(frozen=True, slots=True)
class BreakEven:
    """One tier: its rate, the shortest prefix worth loading, and per prefix what loading and computing take.

    `least_prefix_tokens` None: never, up to 2^20 tokens.
    """

    link: Link
    least_prefix_tokens: int | None
    load_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the planner has to say about a request."""

    request: PlanRequest
    inputs: dict[str, Input]
    figures: dict[str, Figure]
    prefix_tokens: tuple[int, ...]
    needed_bytes_per_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    break_even: tuple[BreakEven, ...]
    strategies: tuple[StrategyRow, ...]
    config_toml: str
    vllm_command: str
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the weights leave room for a session in GPU memory."""
        return (self.figures["hbm_sessions"].value or 0) >= 1

    def value(self, name: str) -> float:
        """A figure's value; infinity where it has no finite one."""
        found = self.figures[name].value
        return math.inf if found is None else found


def make_plan(request: PlanRequest) -> Plan:
    """The plan for a request. Raises ConfigError or GeometryError, one line, for a bad one."""
    inputs = sheet_inputs(request)
    scope = SHEET.bind({name: entry.value for name, entry in inputs.items()})
    figures = {
        cell.name: Figure(finite(scope[cell.name]), cell.unit, cell.formula, cell.assumption)
        for cell in SHEET.cells.values()
        if not cell.params
    }
    tokens = break_even_tokens(request)
    return Plan(
        request=request,
        inputs=inputs,
        figures=figures,
        prefix_tokens=tokens,
        needed_bytes_per_s=tuple(scope.call("breakeven_bytes_per_s", n) for n in tokens),
        compute_s=tuple(scope.call("compute_s", n, 0) for n in tokens),
        break_even=tuple(_break_even(request, scope, link, tokens) for link in links_of(request)),
        strategies=compare(request),
        config_toml=config_toml(scope),
        vllm_command=vllm_command(request),
        warnings=tuple(_warnings(request, scope)),
    )


def finite(value: float) -> float | None:
    """`value`, or None for NaN and infinities, which JSON cannot say."""
    return value if math.isfinite(value) else None


def break_even_tokens(request: PlanRequest) -> tuple[int, ...]:
    """The prefix lengths of the table, up to the model's own limit."""
    limit = request.model.max_tokens or BREAK_EVEN_TOKENS[-1]
    return tuple(n for n in BREAK_EVEN_TOKENS if n <= limit) or (limit,)


def links_of(request: PlanRequest) -> tuple[Link, ...]:
    """RAM, the chosen disk, and the other links of the table."""
    disk = disk_of(request.hardware)
    others = tuple(link for link in LINKS.values() if link.name != disk.name)
    return (ram_link(gpu_named(request.hardware.gpu), request.hardware.pcie_efficiency), disk, *others)


def _break_even(request: PlanRequest, scope: Scope, link: Link, tokens: tuple[int, ...]) -> BreakEven:
    if link.per == "gpu":
        least = scope["ram_least_prefix"]
        loads = tuple(scope.call("ram_load_s", n) for n in tokens)
    else:
        least = scope.call("least_prefix", link.bytes_per_s, link.latency_s)
        loads = tuple(
            scope.call("load_s", scope.call("kv_bytes", n), link.bytes_per_s, link.latency_s) for n in tokens
        )
    return BreakEven(link, int(least) if math.isfinite(least) else None, loads)


def _warnings(request: PlanRequest, scope: Scope) -> list[str]:
    told = []
    limit, context = request.model.max_tokens, request.traffic.context_tokens
    if limit is not None and context > limit:
        told.append(f"prompts of {context} tokens are longer than the model's own limit of {limit}")
    if scope["hbm_kv_bytes"] < 0:
        short = -scope["hbm_kv_bytes"] / 2**30
        told.append(f"the weights do not fit: {short:.1f} GiB per GPU too much; more tp or pp, or fewer bits")
    elif scope["hbm_sessions"] < 1:
        told.append("not one session fits GPU memory beside the weights")
    if scope["load_with"] > 1:
        need = math.ceil(scope["load_with"] * request.hardware.gpus)
        told.append(f"this traffic needs about {need} GPUs even with tiers; {request.hardware.gpus} given")
    elif scope["load_without"] > 1:
        need = math.ceil(scope["load_without"] * request.hardware.gpus)
        told.append(f"without tiers this traffic needs about {need} GPUs; {request.hardware.gpus} given")
    if scope["disk_gain_s"] <= 0:
        told.append(f"loading from {request.hardware.disk} is slower than computing; no disk is planned")
    if scope["disk_load"] > DISK_LOAD_MOST:
        told.append(
            f"returning sessions would keep {request.hardware.disk} {scope['disk_load']:.0%} busy: "
            "they would queue; more RAM, or a faster --disk-rate"
        )
    fixed = scope["kv_fixed_bytes"]
    if fixed:
        told.append("no engine of this version takes a model with recurrent state: these are figures only")
    if fixed and fixed > scope["kv_token_bytes"] * 1024:
        told.append(
            f"a fixed state of {fixed / 1e6:.0f} MB comes with every reuse: short prefixes are not worth it"
        )
    return told


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for scripts: every figure with value, unit, formula and assumptions."""
    request = plan.request
    return {
        "model": {"name": request.model.name, "source": request.model.source},
        "inputs": {
            name: {"value": finite(e.value), "origin": e.origin} for name, e in plan.inputs.items()
        },
        "figures": {name: asdict(figure) for name, figure in plan.figures.items()},
        "break_even": {
            "prefix_tokens": list(plan.prefix_tokens),
            "needed_bytes_per_s": list(plan.needed_bytes_per_s),
            "compute_s": list(plan.compute_s),
            "unit": "bytes/s",
            "formula": SHEET.cells["breakeven_bytes_per_s"].formula,
            "assumptions": SHEET.cells["breakeven_bytes_per_s"].assumption,
            "tiers": [
                asdict(row.link)
                | {"least_prefix_tokens": row.least_prefix_tokens, "load_s": list(row.load_s)}
                for row in plan.break_even
            ],
        },
        "functions": {
            cell.name: {"params": list(cell.params), "unit": cell.unit, "formula": cell.formula,
                        "assumptions": cell.assumption}
            for cell in SHEET.cells.values()
            if cell.params
        },
        "strategies": [
            {key: finite(v) if isinstance(v, float) else v for key, v in asdict(row).items()}
            for row in plan.strategies
        ],
        "config_toml": plan.config_toml,
        "vllm_command": plan.vllm_command,
        "vllm_note": VLLM_NOTE,
        "warnings": list(plan.warnings),
    }  # fmt: skip
