"""`tiercel simulate TRACE` and `tiercel simulate synth`: flags to a report, and nothing else."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiercel.errors import ConfigError
from tiercel.report.files import check_output

if TYPE_CHECKING:
    from tiercel.plan.simulate import Fleet, Request, Trace
    from tiercel.plan.simulate.machine import Machine


class _Simulate(click.Command):
    """`simulate` takes a trace; `simulate synth` is a command of its own (a file of that name: ./synth)."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] == "synth":
            return synth.make_context(f"{info_name} synth", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("simulate", cls=_Simulate)
@click.argument("trace_file", metavar="TRACE")
@click.option("--model", help="Model whose KV a block holds: name, folder or config.json.")
@click.option("--kv-dtype", default="bfloat16", show_default=True, help="KV dtype of the model.")
@click.option(
    "--params", type=float, help="Parameters of the model, such as 70e9, if they cannot be counted."
)
@click.option("--active-params", type=float, help="Parameters a token uses, such as 37e9, if not known.")
@click.option("--bytes-per-token", metavar="SIZE", help="Instead: KV of one token, such as 320KiB.")
@click.option("--block-bytes", metavar="SIZE", help="Instead: KV of one block, such as 160MiB.")
@click.option(
    "--block-tokens", type=click.IntRange(min=1), help="Tokens per id, if the file does not say [512]."
)
@click.option(
    "--policies", default="tiercel,lru,fifo,s3-fifo,opt", show_default=True, help="Which to compare."
)
@click.option("--capacities", metavar="SIZE,…", help="Capacities to compare at, such as 500GB,1TB,2TB.")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="NAME=…",
    help="A tier per host, fastest first: ram=1TB,100GB/s; ssd=8TB,25GB/s,0.2ms; s3=90TB,1GB/s,30ms,shared.",
)
@click.option("--gpu", help="GPU that prefills, such as h100 (with --model).")
@click.option(
    "--mfu",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.5,
    show_default=True,
    help="Share of the GPU's peak FLOP/s reached.",
)
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs per engine.")
@click.option(
    "--prefill",
    "prefill_points",
    multiple=True,
    metavar="TOKENS=TIME",
    help="Instead of --gpu: measured prefill times, such as 8192=0.9s.",
)
@click.option("--hosts", type=click.IntRange(1, 1000), default=1, show_default=True, help="Hosts.")
@click.option("--engines", type=click.IntRange(min=1), default=1, show_default=True, help="Engines per host.")
@click.option(
    "--router",
    type=click.Choice(["prefix", "random"]),
    default="prefix",
    show_default=True,
    help="How requests find a host.",
)
@click.option(
    "--write",
    type=click.Choice(["through", "evict"]),
    default="through",
    show_default=True,
    help="When lower tiers get a block.",
)
@click.option("--no-promote", is_flag=True, help="Do not copy into the first tier what a lower one served.")
@click.option("--always-load", is_flag=True, help="Load every cached block, even where computing is faster.")
@click.option("--split", is_flag=True, help="Engines may compute a prefix's start while its end loads.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Speed up arrivals by this factor.",
)
@click.option(
    "--warmup",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of requests that only fill the cache.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="NAME=AMOUNT",
    help="gpu-hour=3.50, or a tier's price per GB and month: ssd=0.20.",
)
@click.option("--prices-as-of", metavar="DATE", help="The day these prices held; needed with --price.")
@click.option(
    "--endurance",
    multiple=True,
    metavar="TIER=SIZE",
    help="Bytes a tier's drives are rated for, per host: ssd=14000TB.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the router's random choices.")
@click.option("--skip-bad-lines", is_flag=True, help="Count lines that are not requests instead of stopping.")
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write charts and tables as one HTML file.",
)
@click.option("--png", "png_file", type=click.Path(path_type=Path, dir_okay=False), help="Draw the charts.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    trace_file: str,
    as_json: bool,
    html_file: Path | None,
    png_file: Path | None,
    block_tokens: int | None,
    skip_bad_lines: bool,
    rate: float,
    **flags: Any,
) -> None:
    """Replay a request trace (JSON lines, gzip or not, - for standard input) against caches you might buy.

    \b
    tiercel simulate trace.jsonl
    tiercel simulate trace.jsonl --model llama-3.1-70b --gpu h100 --tp 8 --hosts 4 \\
        --tier ram=1TB,100GB/s --tier ssd=8TB,25GB/s,0.2ms --html report.html
    tiercel simulate synth --requests 100000 --turns 6 > synth.jsonl

    Lines are Mooncake's ({"timestamp": ms, "input_length", "output_length", "hash_ids"}), or the same after a
    header line that states the block size. Without a model, capacities are in tokens. With --tier, hosts with
    queues are simulated too. docs/simulate.md says what each number means.
    """
    from dataclasses import replace

    from tiercel.plan.simulate import read_trace, simulate

    check_output("--html", html_file)
    check_output("--png", png_file)
    trace = read_trace(trace_file, block_tokens=block_tokens, skip_bad_lines=skip_bad_lines)
    if rate != 1.0:
        trace = replace(trace, arrival_s=trace.arrival_s / rate)
    request = _request(trace, rate, flags)
    report = simulate(trace, request)
    if as_json:
        click.echo(json.dumps(report.data, indent=1))
    else:
        from tiercel.plan.simulate.text import print_report

        print_report(report.data)
    if html_file is not None:
        from tiercel.plan.simulate.page import write_page

        write_page(html_file, report.data, report.ttft_s)
    if png_file is not None:
        from tiercel.plan.simulate.png import write_png

        write_png(png_file, report.data, report.ttft_s)


def _request(trace: Trace, rate: float, flags: dict[str, Any]) -> Request:
    from tiercel.plan.simulate import POLICIES, Request
    from tiercel.plan.simulate.machine import machine_of
    from tiercel.plan.simulate.parse import parse_endurance, parse_prices, parse_sizes

    policies = [name.strip() for name in flags["policies"].split(",")]
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"--policies: '{name}' is unknown; accepted: {', '.join(POLICIES)}")
    sizes = {name: _stated_bytes(name, flags[name]) for name in ("bytes_per_token", "block_bytes")}
    machine = machine_of(
        trace.block_tokens,
        model=flags["model"],
        kv_dtype_name=flags["kv_dtype"],
        params=flags["params"],
        active_params=flags["active_params"],
        gpu=flags["gpu"],
        mfu=flags["mfu"],
        tp=flags["tp"],
        prefill_points=flags["prefill_points"],
        **sizes,
    )
    assumptions = dict(machine.assumptions)
    if rate != 1.0:
        assumptions["rate"] = f"arrivals {rate:g} times as fast as in the file"
    return Request(
        policies=policies,
        capacities_bytes=parse_sizes("--capacities", flags["capacities"]) if flags["capacities"] else (),
        block_bytes=machine.block_bytes,
        fleet=_fleet(machine, flags),
        prices=parse_prices(flags["prices"], flags["prices_as_of"]),
        endurance_bytes=parse_endurance(flags["endurance"]),
        assumptions=assumptions,
    )


def _stated_bytes(name: str, text: str | None) -> int | None:
    from tiercel.config import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None


def _fleet(machine: Machine, flags: dict[str, Any]) -> Fleet | None:
    """The hosts that were described, None if no tier was."""
    from tiercel.plan.simulate import Fleet
    from tiercel.plan.simulate.parse import parse_tier

    if not flags["tiers"]:
        for name in ("prices", "endurance"):
            if flags[name]:
                flag = "--price" if name == "prices" else "--endurance"
                raise ConfigError(f"{flag} needs at least one --tier, whose cost and wear it is about")
        return None
    if machine.block_bytes is None:
        raise ConfigError("--tier needs the size of a block: --model, --bytes-per-token or --block-bytes")
    if machine.prefill is None:
        raise ConfigError("--tier needs the time of prefill: --gpu with --model, or --prefill 8192=0.9s")
    tiers = tuple(parse_tier(text) for text in flags["tiers"])
    named = {tier.name for tier in tiers}
    for flag, texts, names in (
        ("--price", flags["prices"], named | {"gpu-hour"}),
        ("--endurance", flags["endurance"], named),
    ):
        for text in texts:
            if text.partition("=")[0] not in names:
                raise ConfigError(f"{flag}: '{text}' names no tier; accepted: {', '.join(sorted(names))}")
    return Fleet(
        block_bytes=machine.block_bytes,
        tiers=tiers,
        prefill=machine.prefill,
        hosts=flags["hosts"],
        engines_per_host=flags["engines"],
        gpus_per_engine=flags["tp"],
        router=flags["router"],
        write=flags["write"],
        promote=not flags["no_promote"],
        always_load=flags["always_load"],
        split=flags["split"],
        seed=flags["seed"],
        warmup=flags["warmup"],
    )


@click.command("synth")
@click.option("--requests", type=int, default=10_000, show_default=True, help="How many.")
@click.option("--rate", "rate_per_s", type=float, default=3.0, show_default=True, help="Requests per second.")
@click.option("--turns", type=float, default=4.0, show_default=True, help="Mean turns of a session.")
@click.option("--idle", metavar="TIME", default="60s", show_default=True, help="Mean gap between turns.")
@click.option(
    "--system-tokens", type=int, default=1024, show_default=True, help="Prompt all sessions begin with."
)
@click.option("--documents", type=int, default=100, show_default=True, help="Different shared documents.")
@click.option("--document-tokens", type=int, default=8192, show_default=True, help="Length of each.")
@click.option(
    "--document-share",
    type=float,
    default=0.5,
    show_default=True,
    help="Share of sessions that ask about one.",
)
@click.option(
    "--zipf", type=float, default=1.0, show_default=True, help="Exponent of the documents' popularity."
)
@click.option("--turn-tokens", type=int, default=800, show_default=True, help="Mean new tokens per turn.")
@click.option("--output-tokens", type=int, default=300, show_default=True, help="Mean tokens of an answer.")
@click.option(
    "--context",
    "context_tokens_max",
    type=int,
    default=131_072,
    show_default=True,
    help="A session ends at this length.",
)
@click.option("--block-tokens", type=int, default=512, show_default=True, help="Tokens per block.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same trace.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File [standard output]."
)
def synth(idle: str, output: Path | None, **flags: Any) -> None:
    """Make a trace of chosen shape: sessions of several turns over shared documents."""
    from tiercel.config import parse_seconds
    from tiercel.plan.simulate import Shape, write_trace

    shape = Shape(
        idle_s=parse_seconds(idle), **{f.name: flags[f.name] for f in fields(Shape) if f.name in flags}
    )
    if output is None:
        write_trace(sys.stdout, shape)
        return
    try:
        with output.open("w", encoding="utf-8") as stream:
            write_trace(stream, shape)
    except OSError as error:
        raise ConfigError(f"--output: '{output}' cannot be written: {error.strerror or error}") from None
