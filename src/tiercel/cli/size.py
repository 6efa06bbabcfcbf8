"""`tiercel size`: how large a model's KV cache is, and what fits. It never loads torch or weights."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click

from tiercel.config.units import parse_bytes
from tiercel.errors import ConfigError, TiercelError
from tiercel.geometry import DTYPES, GroupKind, KVGeometry, kv_dtype
from tiercel.geometry.engines import Engine
from tiercel.geometry.load import read_config
from tiercel.plan import catalogue, size, size_text, weights
from tiercel.plan.hardware import GPUS, gpu_named
from tiercel.plan.parallel import Parallel

DEFAULT_TOKENS = 32_768
SHOWN_FORMATS = ("bf16", "fp8", "awq-int4")
VLLM_MEMORY_SHARE = 0.9


@click.command(name="size", short_help="How large the KV cache of a model is, and what fits.")
@click.argument("model", required=False)
@click.option("--tokens", type=int, default=DEFAULT_TOKENS, show_default=True, help="Tokens of one sequence.")
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences (users) at once.")
@click.option("--kv-dtype", default="bfloat16", show_default=True, help=f"One of: {', '.join(DTYPES)}.")
@click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=int, default=1, show_default=True, help="Pipeline stages.")
@click.option("--cp", type=int, default=1, show_default=True, help="Context-parallel ranks (tokens divided).")
@click.option("--engine", default="exact", show_default=True, help=f"Whose storage: {', '.join(Engine)}.")
@click.option("--block-tokens", type=click.IntRange(1, 65_536), help="vLLM's block size [default: 16].")
@click.option(
    "--in-flight", type=click.IntRange(0, 10**7), help="vLLM's max_num_batched_tokens [default: 2048]."
)
@click.option(
    "--source-tokens", type=click.IntRange(0, 10**9), help="Encoder or image tokens, for cross attention."
)
@click.option("--gpu", help=f"What fits on this GPU, one per rank: {', '.join(GPUS)}.")
@click.option("--memory", help="What fits in this much KV memory per rank, such as 16GiB.")
@click.option(
    "--memory-share",
    type=click.FloatRange(0, 1, min_open=True),
    default=VLLM_MEMORY_SHARE,
    show_default=True,
    help="Part of the GPU's memory that the engine may use.",
)
@click.option("--weights-dtype", help=f"Weights on the GPU: {', '.join(weights.WEIGHT_FORMATS)}.")
@click.option("--params", help="Parameters of the model, such as 8.03e9, where they cannot be counted.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--list", "list_models", is_flag=True, help="Print the built-in models.")
def command(model: str | None, list_models: bool, as_json: bool, **asked: Any) -> None:
    """Size the KV cache of MODEL: a config.json (- for standard input), a model folder, or a built-in name.

    \b
    tiercel size llama-3.1-8b --tokens 8192 --batch 16
    tiercel size ./config.json --kv-dtype fp8 --tp 8
    tiercel size qwen3-32b --gpu h100 --weights-dtype awq-int4
    """
    if list_models:
        _list(as_json)
        return
    if not model:
        raise ConfigError(
            "MODEL is missing; accepted: a config.json, a model folder, - or a built-in name (--list)"
        )
    title, source, told = catalogue.open_model(model)
    geometry = _with_source_tokens(KVGeometry.from_config(source), asked["source_tokens"])
    report = size.measure(
        geometry,
        kv_dtype(asked["kv_dtype"]),
        asked["tokens"],
        asked["batch"],
        Parallel(asked["tp"], asked["pp"], asked["cp"]),
        asked["engine"],
        asked["block_tokens"],
        asked["in_flight"],
    )
    parameters = _parameters(source, asked["params"])
    rows = _weight_rows(report, parameters, asked["weights_dtype"])
    fit = _fit(report, parameters, asked)
    if as_json:
        _print_json(report, parameters, rows if asked["weights_dtype"] else [], fit)
        return
    lines = size_text.headline(title, told, report)
    lines += size_text.cache_lines(report)
    lines += size_text.rank_lines(report)
    if parameters is not None:
        lines += size_text.weight_lines(report, parameters, rows)
    if fit is not None:
        lines += size_text.fit_lines(report, fit)
    click.echo("\n".join(lines))


def _list(as_json: bool) -> None:
    models = catalogue.models()
    if as_json:
        click.echo(json.dumps({name: entry.source for name, entry in models.items()}, indent=1))
        return
    for name, entry in models.items():
        click.echo(
            f"{name}{'  (not compared with its config.json)' if catalogue.UNCHECKED in entry.source else ''}"
        )


def _with_source_tokens(geometry: KVGeometry, tokens: int | None) -> KVGeometry:
    if tokens is None:
        return geometry
    if not any(group.kind is GroupKind.CROSS for group in geometry.groups):
        raise ConfigError(f"--source-tokens: {tokens}; accepted: only for models with cross attention")
    groups = tuple(
        replace(group, source_tokens=tokens) if group.kind is GroupKind.CROSS else group
        for group in geometry.groups
    )
    return replace(geometry, groups=groups)


def _parameters(source: Any, stated: str | None) -> weights.Parameters | None:
    name, config = read_config(source)
    counted = weights.count_parameters(name, config)
    if stated is None:
        return counted
    try:
        total = float(stated)
    except ValueError:
        total = 0.0
    if not 1 <= total <= 1e15:
        raise ConfigError(f"--params: {stated!r}; accepted: a number of parameters, such as 8.03e9")
    embedding = counted.embedding if counted is not None else 0
    return weights.Parameters(round(total), min(embedding, round(total)), "as given")


def _weight_rows(
    report: size.SizeReport, parameters: weights.Parameters | None, dtype: str | None
) -> list[size.WeightRow]:
    formats = [weights.weight_format(name) for name in ((dtype,) if dtype else SHOWN_FORMATS)]
    if parameters is None:
        if dtype:
            raise ConfigError(
                f"--weights-dtype: the parameters of a {report.geometry.model_type} model cannot be counted "
                "here; accepted: with --params, such as --params 8.03e9"
            )
        return []
    return [size.weight_row(report, parameters, fmt) for fmt in formats]


def _fit(
    report: size.SizeReport, parameters: weights.Parameters | None, asked: dict[str, Any]
) -> size.Fit | None:
    if asked["memory"] is not None:
        if asked["gpu"] is not None:
            raise ConfigError("--memory and --gpu: give one of them")
        return size.fit_into(report, _bytes(asked["memory"]))
    if asked["gpu"] is None:
        return None
    gpu = gpu_named(asked["gpu"])
    if not 0 < asked["memory_share"] <= 1:  # NaN passes click's range
        raise ConfigError(f"--memory-share: {asked['memory_share']}; accepted: above 0, at most 1")
    if parameters is None:
        raise ConfigError(
            "--gpu: the size of the weights is needed; accepted: with --params, such as --params 8e9"
        )
    fmt = weights.weight_format(asked["weights_dtype"] or "bf16")
    held = -(-fmt.nbytes(parameters) // (report.parallel.tp * report.parallel.pp))
    usable = int(gpu.hbm_bytes * asked["memory_share"])
    fit = size.fit_into(report, usable - held)
    told = (
        f"{gpu.title}: {size_text.both(gpu.hbm_bytes)} × {asked['memory_share']:g}\n"
        f"    - {size_text.both(held)} of {fmt.name} weights (activations are not subtracted)"
    )
    return replace(fit, memory_bytes=usable, weights_bytes=held, told=told)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except TiercelError as error:
        raise ConfigError(f"--memory: {error}") from None


def _print_json(
    report: size.SizeReport,
    parameters: weights.Parameters | None,
    rows: list[size.WeightRow],
    fit: size.Fit | None,
) -> None:
    result = size.as_json(report)
    if rows and parameters is not None:
        result["weights"] = size.weights_json(rows[0], parameters)
    if fit is not None:
        result["fit"] = size.fit_json(fit)
    click.echo(json.dumps(result, indent=1))
