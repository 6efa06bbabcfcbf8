"""`tiercel cache copy SRC DST`: warm a new tier from another one."""

from __future__ import annotations

import dataclasses
import json
import os
from contextlib import ExitStack
from pathlib import Path

import click

from tiercel.cli import EXIT_INTERRUPTED
from tiercel.cli.cache_places import open_place, tier_of
from tiercel.cli.options import config_options, load_config
from tiercel.cli.progress import ProgressLine
from tiercel.config import TierConfig, human_bytes
from tiercel.config.units import parse_bytes
from tiercel.errors import ConfigError
from tiercel.store.copying import CopyReport, copy
from tiercel.store.inspect import CachePlace

EXIT_SOME_NOT_COPIED = 1


@click.command("copy")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--model", help="Only blocks of this model, as `ls` shows it.")
@click.option("--salt", help="Only blocks of the tenant with this cache salt (the salt itself).")
@click.option("--limit", metavar="SIZE", help="Most bytes DST may hold then [default: its configured size].")
@click.option("--threads", type=click.IntRange(1, 64), default=2, show_default=True, help="Copies at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@config_options
def copy_command(
    source: str,
    target: str,
    model: str | None,
    salt: str | None,
    limit: str | None,
    threads: int,
    as_json: bool,
    config_file: Path | None,
    settings: tuple[str, ...],
) -> int:
    """Copy cached blocks from SRC to DST: directories, URLs, or tiers of the configuration.

    What was used last comes first; what DST has already is not copied again, so a copy that was cut short
    goes on where it was. Every block is checked on the way, and a bad one is left behind. Nothing is deleted.

    Exit code 0: all that was sound and had room is in DST. 1: some blocks were bad or could not be copied.
    """
    config = load_config(config_file, settings)
    from_tier, to_tier = tier_of(source, config), tier_of(target, config)
    if _place(from_tier) == _place(to_tier):
        raise ConfigError(f"SRC {source} and DST {target} are the same place; accepted: two places")
    cap_bytes = to_tier.size_bytes if limit is None else _limit(limit)
    line = ProgressLine()
    report, interrupted = CopyReport(), False
    with ExitStack() as stack:
        src = _opened(open_place(from_tier, config), stack)
        dst = _opened(open_place(to_tier, config, create=True), stack)
        tags = None
        if model is not None or salt is not None:
            tags = frozenset(row.tag for row in src.scopes() if row.matches(model, salt))

        def show(so_far: CopyReport) -> None:
            nonlocal report
            report = so_far
            done = so_far.copied + so_far.there_already + so_far.bad + so_far.failed + so_far.left_out
            line.show(
                f"{dst.shown}: {done:,} of {so_far.records:,} blocks, "
                f"{human_bytes(so_far.copied_bytes)} copied"
            )

        try:
            report = copy(src, dst, tags=tags, cap_bytes=cap_bytes, threads=threads, progress=show)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            line.end()
    click.echo(_json(report, interrupted) if as_json else _text(report, dst.shown))
    if interrupted:
        click.echo("interrupted; the same command goes on from here", err=True)
        return EXIT_INTERRUPTED
    return EXIT_SOME_NOT_COPIED if report.bad or report.failed else 0


def _opened(place: CachePlace, stack: ExitStack) -> CachePlace:
    stack.callback(place.close)
    return place


def _place(tier: TierConfig) -> str:
    return os.path.realpath(tier.path) if tier.path is not None else tier.url or ""


def _limit(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"--limit: {error}") from None


def _text(report: CopyReport, shown: str) -> str:
    line = f"{shown}: {report.copied:,} blocks copied ({human_bytes(report.copied_bytes)})"
    parts = (
        (report.there_already, "there already"),
        (report.left_out, "left out, no room for them"),
        (report.bad, "bad ones left behind"),
        (report.failed, "could not be copied"),
    )
    return line + "".join(f"; {count:,} {what}" for count, what in parts if count)


def _json(report: CopyReport, interrupted: bool) -> str:
    return json.dumps({**dataclasses.asdict(report), "interrupted": interrupted}, indent=1)
