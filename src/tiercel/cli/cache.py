"""`tiercel cache`: look into tiers, check, clear and fill them; steer the prompts of a running server.

A directory that is not a cache is refused, whatever is asked. Only `clear` and `verify` delete, and only
records. Results go to stdout, progress to stderr; Ctrl-C ends each in order and tells what was done.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import click

from tiercel.cli import EXIT_INTERRUPTED
from tiercel.cli.cache_copy import copy_command
from tiercel.cli.cache_places import open_places
from tiercel.cli.cache_steer import steer_commands
from tiercel.cli.cache_warm import warm_command
from tiercel.cli.options import config_options, load_config
from tiercel.cli.progress import ProgressLine
from tiercel.config import human_bytes, parse_seconds
from tiercel.errors import ConfigError, TierError
from tiercel.store.inspect import CachePlace, ScopeRow, VerifyReport

F = TypeVar("F", bound=Callable[..., object])
Listing = list[tuple[CachePlace, list[ScopeRow]]]

EXIT_FOUND_BAD = 1
_SHORT_CHARS = 12
_WEEKS = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*w")
_DAY_S = 86400.0
_COLUMNS = tuple("MODEL REVISION DTYPE LAYOUT SALT ADAPTER TOKENS BLOCKS SIZE OLDEST NEWEST".split())
_TO_THE_RIGHT = frozenset({"TOKENS", "BLOCKS", "SIZE"})


@click.group()
def command() -> None:
    """Look into caches, check them, clear them, copy and fill them; steer single prompts of a server.

    A PLACE is a directory, the URL of a tier, or a tier of the configuration by its name or number; without
    one it is every configured tier. All commands work while stores use the places.
    """


command.add_command(copy_command)
command.add_command(warm_command)
for steer_command in steer_commands():
    command.add_command(steer_command)


def _places(function: F) -> F:
    argument = click.argument("places", metavar="[PLACE]...", nargs=-1)
    return argument(config_options(function))


@command.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_places
def ls(places: tuple[str, ...], config_file: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """List what is cached: a row for each model, weights, layout, tenant and adapter.

    Reads names, sizes and one header per row, and changes nothing.
    """
    line = ProgressLine()
    with ExitStack() as stack:
        opened = open_places(places, load_config(config_file, settings), stack)
        listing = [(place, _scopes(place, line)) for place in opened]
    if as_json:
        click.echo(_json(listing))
        return
    now_s = time.time()
    for number, (place, rows) in enumerate(listing):
        if number:
            click.echo()
        click.echo(f"{place.shown}: {_total(rows)}")
        if rows:
            click.echo(_table([_cells(row, now_s) for row in rows]))


@command.command("verify")
@click.option("--dry-run", is_flag=True, help="Only say what is bad; delete nothing.")
@click.option("--threads", type=click.IntRange(1, 64), default=2, show_default=True, help="Checks at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_places
def verify(
    places: tuple[str, ...],
    config_file: Path | None,
    settings: tuple[str, ...],
    dry_run: bool,
    threads: int,
    as_json: bool,
) -> int:
    """Check every byte of every block; delete those that are bad.

    Exit code 0: all sound. 1: bad blocks were found (and deleted, unless --dry-run).
    """
    reports: list[tuple[CachePlace, VerifyReport]] = []
    line = ProgressLine()
    interrupted = False
    with ExitStack() as stack:
        for place in open_places(places, load_config(config_file, settings), stack):
            reports.append((place, VerifyReport()))

            def show(report: VerifyReport, place: CachePlace = place) -> None:
                reports[-1] = (place, report)
                line.show(f"{place.shown}: checked {report.checked:,} blocks, {len(report.bad):,} bad")

            try:
                reports[-1] = (place, place.verify(repair=not dry_run, threads=threads, progress=show))
            except KeyboardInterrupt:
                interrupted = True
                break
            finally:
                line.end()
    if as_json:
        click.echo(_verify_json(reports, interrupted))
    else:
        for place, report in reports:
            _print_report(place, report, dry_run)
    if interrupted:
        click.echo("interrupted; the rest was not checked", err=True)
        return EXIT_INTERRUPTED
    return EXIT_FOUND_BAD if any(report.bad for _, report in reports) else 0


@command.command("clear")
@click.option("--model", help="Only blocks of this model, as `ls` shows it.")
@click.option("--salt", help="Only blocks of the tenant with this cache salt (the salt itself).")
@click.option("--older-than", metavar="TIME", help="Only blocks not used for this long, such as 7d or 12h.")
@click.option("--all", "everything", is_flag=True, help="All blocks.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_places
def clear(
    places: tuple[str, ...],
    config_file: Path | None,
    settings: tuple[str, ...],
    model: str | None,
    salt: str | None,
    older_than: str | None,
    everything: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete cached blocks: those that meet every condition given, or --all."""
    if everything == (model is not None or salt is not None or older_than is not None):
        raise ConfigError("clear needs --all, or one or more of --model, --salt and --older-than (not both)")
    older_than_s = _age(older_than) if older_than is not None else 0.0
    line = ProgressLine()
    with ExitStack() as stack:
        doomed: Listing = []
        for place in open_places(places, load_config(config_file, settings), stack):
            rows = _scopes(place, line, older_than_s)
            doomed.append((place, [row for row in rows if row.matches(model, salt)]))
        if any(rows for _, rows in doomed) and not yes and not _confirmed(doomed):
            click.echo("nothing deleted", err=True)
            return 1
        gone = [
            place.clear([row.tag for row in rows], older_than_s=older_than_s)
            for place, rows in doomed
            if rows
        ]
    blocks, deleted_bytes = sum(count for count, _ in gone), sum(size for _, size in gone)
    if as_json:
        click.echo(_json(doomed, deleted_blocks=blocks, deleted_bytes=deleted_bytes))
    else:
        click.echo(f"deleted {blocks:,} blocks, {human_bytes(deleted_bytes)}")
    return 0


def _confirmed(doomed: Listing) -> bool:
    for place, rows in doomed:
        models = ", ".join(sorted({str(row.info.get("model", "unknown model")) for row in rows}))
        click.echo(f"{place.shown}: {_total(rows)} ({_clean(models)})", err=True)
    try:
        return click.confirm("Delete these blocks?", err=True)
    except click.Abort:
        raise TierError("clear was not confirmed; give --yes to delete without being asked") from None


def _age(text: str) -> float:
    """A duration as the configuration takes it, and weeks besides."""
    weeks = _WEEKS.fullmatch(text.strip())
    try:
        age_s = float(weeks[1]) * 7 * _DAY_S if weeks else parse_seconds(text)
    except ConfigError:
        raise ConfigError(f"--older-than: '{text}' is not a time; accepted: such as 7d, 12h or 30m") from None
    if age_s <= 0:
        raise ConfigError(f"--older-than: '{text}' would be every block; say --all for that")
    return age_s


def _scopes(place: CachePlace, line: ProgressLine, older_than_s: float = 0.0) -> list[ScopeRow]:
    try:
        return place.scopes(
            older_than_s=older_than_s,
            progress=lambda records: line.show(f"{place.shown}: {records:,} blocks listed"),
        )
    finally:
        line.end()


def _where(place: CachePlace, key: str, path: str) -> str:
    return f"{place.shown}/{path}" if in_files(place) else f"{place.shown}: block {key}"


def in_files(place: CachePlace) -> bool:
    """Whether the place is a directory whose files a person can look at."""
    return "://" not in place.shown


def _print_report(place: CachePlace, report: VerifyReport, dry_run: bool) -> None:
    for bad in report.bad:
        fate = "" if dry_run else ", deleted" if bad.deleted else ", not deleted"
        click.echo(f"{_where(place, bad.key.hex(), bad.path)}: {_clean(bad.reason)}{fate}")
    line = f"{place.shown}: {report.checked:,} blocks checked ({human_bytes(report.checked_bytes)}), "
    line += f"{len(report.bad):,} bad" if report.bad else "all sound"
    if report.locked:
        line += f"; {report.locked:,} encrypted with a key that is not here, not checked"
    if report.leftovers:
        line += f"; {report.leftovers:,} unfinished files of dead writers{'' if dry_run else ' removed'}"
    if report.other_files:
        line += f"; {report.other_files:,} other files left alone"
    click.echo(line)


def _verify_json(reports: Iterable[tuple[CachePlace, VerifyReport]], interrupted: bool) -> str:
    pairs = list(reports)
    rows = [
        {
            "place": place.shown,
            "key": bad.key.hex(),
            **({"file": bad.path} if in_files(place) else {}),
            "bytes": bad.file_bytes,
            "reason": bad.reason,
            "deleted": bad.deleted,
        }
        for place, report in pairs
        for bad in report.bad
    ]
    totals = {
        "checked": sum(report.checked for _, report in pairs),
        "checked_bytes": sum(report.checked_bytes for _, report in pairs),
        "bad": len(rows),
        "locked": sum(report.locked for _, report in pairs),
        "leftovers": sum(report.leftovers for _, report in pairs),
        "other_files": sum(report.other_files for _, report in pairs),
        "interrupted": interrupted,
    }
    return json.dumps({"rows": rows, **totals}, indent=1)


def _json(listing: Listing, **more: int) -> str:
    rows = [
        {
            **row.info,
            "place": place.shown,
            "scope": row.tag.hex(),
            "blocks": row.blocks,
            "bytes": row.file_bytes,
            "oldest_use_s": row.oldest_s,
            "newest_use_s": row.newest_s,
        }
        for place, found in listing
        for row in found
    ]
    totals = {
        "blocks": sum(row.blocks for _, found in listing for row in found),
        "bytes": sum(row.file_bytes for _, found in listing for row in found),
    }
    return json.dumps({"rows": rows, **totals, **more}, indent=1)


def _total(rows: Sequence[ScopeRow]) -> str:
    blocks, size = sum(row.blocks for row in rows), sum(row.file_bytes for row in rows)
    scopes = "1 scope" if len(rows) == 1 else f"{len(rows):,} scopes"
    return f"{blocks:,} blocks in {scopes}, {human_bytes(size)}" if rows else "empty"


def _kept(info: Mapping[str, str | int]) -> str:
    """How blocks are kept that may come back changed."""
    return f" as {str(info['lossy']).partition(' ')[0]}" if "lossy" in info else ""


def _cells(row: ScopeRow, now_s: float) -> tuple[str, ...]:
    info = row.info
    return (
        _clean(str(info.get("model", "unknown"))),
        _clean(str(info.get("revision", "-")))[:_SHORT_CHARS],
        _clean(str(info.get("kv_dtype", "-")) + _kept(info)),
        _clean(str(info.get("layout", "-"))),
        _clean(str(info.get("salt", "-"))),
        _clean(str(info.get("adapter", "-")))[:_SHORT_CHARS],
        str(info.get("block_tokens", "-")),
        f"{row.blocks:,}",
        human_bytes(row.file_bytes),
        _ago(now_s - row.oldest_s),
        _ago(now_s - row.newest_s),
    )


def _clean(text: str) -> str:
    """A text from a header, for a terminal: a record may say anything, and must not steer it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _ago(age_s: float) -> str:
    for unit, length_s in (("d", _DAY_S), ("h", 3600.0), ("m", 60.0)):
        if age_s >= length_s:
            return f"{age_s / length_s:.0f}{unit} ago"
    return "just now"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [_COLUMNS, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in _TO_THE_RIGHT else cell.ljust(width)
            for column, cell, width in zip(_COLUMNS, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )
