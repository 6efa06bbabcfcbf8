"""`tiercel cache ls | verify | clear`: look into cache directories, check them, and delete parts of them.

A directory that is not a cache is refused, whatever is asked. Only `clear` and `verify` delete, and only
records.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import click

from tiercel.cli.options import config_options, load_config
from tiercel.config import human_bytes, parse_seconds
from tiercel.errors import ConfigError, TierError
from tiercel.store.inspect import CacheDirectory, ScopeRow, VerifyReport

F = TypeVar("F", bound=Callable[..., object])
Listing = list[tuple[CacheDirectory, list[ScopeRow]]]

EXIT_FOUND_BAD = 1
_SHORT_CHARS = 12
_DAYS = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*([dw])")
_DAY_S = 86400.0
_COLUMNS = tuple("MODEL REVISION DTYPE LAYOUT SALT ADAPTER TOKENS BLOCKS SIZE OLDEST NEWEST".split())
_TO_THE_RIGHT = frozenset({"TOKENS", "BLOCKS", "SIZE"})


@click.group()
def command() -> None:
    """Look into cache directories, check them, clear them.

    Each command takes directories, or else those of the configured tiers. All work while stores use them.
    """


def _directories(function: F) -> F:
    argument = click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
    return argument(config_options(function))


@command.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_directories
def ls(
    directories: tuple[Path, ...], config_file: Path | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """List what is cached: a row for each model, weights, layout, tenant and adapter.

    Reads names, sizes and one header per row, and changes nothing.
    """
    opened = _open(directories, config_file, settings)
    listing = [(directory, directory.scopes()) for directory in opened]
    if as_json:
        click.echo(_json(listing))
        return
    now_s = time.time()
    for number, (directory, rows) in enumerate(listing):
        if number:
            click.echo()
        click.echo(f"{directory.root}: {_total(rows)}")
        if rows:
            click.echo(_table([_cells(row, now_s) for row in rows]))


@command.command("verify")
@click.option("--dry-run", is_flag=True, help="Only say what is bad; delete nothing.")
@click.option("--threads", type=click.IntRange(1, 64), default=2, show_default=True, help="Checks at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_directories
def verify(
    directories: tuple[Path, ...],
    config_file: Path | None,
    settings: tuple[str, ...],
    dry_run: bool,
    threads: int,
    as_json: bool,
) -> int:
    """Check every byte of every block; delete those that are bad.

    Exit code 0: all sound. 1: bad blocks were found (and deleted, unless --dry-run).
    """
    reports: list[tuple[CacheDirectory, VerifyReport]] = []
    for directory in _open(directories, config_file, settings):
        report = directory.verify(repair=not dry_run, threads=threads, progress=_progress(directory.root))
        reports.append((directory, report))
    if as_json:
        click.echo(_verify_json(reports))
    else:
        for directory, report in reports:
            _print_report(directory, report, dry_run)
    return EXIT_FOUND_BAD if any(report.bad for _, report in reports) else 0


@command.command("clear")
@click.option("--model", help="Only blocks of this model, as `ls` shows it.")
@click.option("--salt", help="Only blocks of the tenant with this cache salt (the salt itself).")
@click.option("--older-than", metavar="TIME", help="Only blocks not used for this long, such as 7d or 12h.")
@click.option("--all", "everything", is_flag=True, help="All blocks.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_directories
def clear(
    directories: tuple[Path, ...],
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
    doomed: Listing = []
    for directory in _open(directories, config_file, settings):
        rows = directory.scopes(older_than_s=older_than_s)
        doomed.append((directory, [row for row in rows if _chosen(row, model, salt)]))
    if any(rows for _, rows in doomed) and not yes and not _confirmed(doomed):
        click.echo("nothing deleted", err=True)
        return 1
    gone = [d.clear([row.tag for row in rows], older_than_s=older_than_s) for d, rows in doomed]
    blocks, deleted_bytes = sum(count for count, _ in gone), sum(size for _, size in gone)
    if as_json:
        click.echo(_json(doomed, deleted_blocks=blocks, deleted_bytes=deleted_bytes))
    else:
        click.echo(f"deleted {blocks:,} blocks, {human_bytes(deleted_bytes)}")
    return 0


def _open(
    directories: Sequence[Path], config_file: Path | None, settings: Sequence[str]
) -> list[CacheDirectory]:
    places = list(dict.fromkeys(directories))
    if not places:
        tiers = load_config(config_file, settings).tiers
        places = [tier.path for tier in tiers if tier.path is not None]
    if not places:
        raise ConfigError("no cache directory: give DIR, or a configuration with a tier of kind 'files'")
    # All of them before anything is done to one.
    return [CacheDirectory(place) for place in places]


def _chosen(row: ScopeRow, model: str | None, salt: str | None) -> bool:
    if model is not None and row.info.get("model") != model:
        return False
    return salt is None or row.has_salt(salt)


def _confirmed(doomed: Listing) -> bool:
    for directory, rows in doomed:
        models = ", ".join(sorted({str(row.info.get("model", "unknown model")) for row in rows}))
        click.echo(
            f"{directory.root}: {_total(rows)} ({_clean(models)})" if rows else directory.root, err=True
        )
    try:
        return click.confirm("Delete these blocks?", err=True)
    except click.Abort:
        raise TierError("clear was not confirmed; give --yes to delete without being asked") from None


def _age(text: str) -> float:
    """A duration as the configuration takes it, and days and weeks besides."""
    days = _DAYS.fullmatch(text.strip())
    try:
        age_s = float(days[1]) * _DAY_S * (7 if days[2] == "w" else 1) if days else parse_seconds(text)
    except ConfigError:
        raise ConfigError(f"--older-than: '{text}' is not a time; accepted: such as 7d, 12h or 30m") from None
    if age_s <= 0:
        raise ConfigError(f"--older-than: '{text}' would be every block; say --all for that")
    return age_s


def _progress(root: Path) -> Callable[[int, int], None]:
    """A line that is written over, for a person who watches; silent otherwise."""
    stream = sys.stderr
    shown_s = [0.0]

    def show(done: int, total: int) -> None:
        now_s = time.monotonic()
        if not stream.isatty() or (done < total and now_s - shown_s[0] < 0.1):
            return
        shown_s[0] = now_s
        end = "\n" if done == total else ""
        stream.write(f"\r{root}: checked {done:,} of {total:,} blocks{end}")
        stream.flush()

    return show


def _print_report(directory: CacheDirectory, report: VerifyReport, dry_run: bool) -> None:
    for bad in report.bad:
        fate = "" if dry_run else ", deleted" if bad.deleted else ", could not be deleted"
        click.echo(f"{directory.root / bad.path}: {bad.reason}{fate}")
    line = f"{directory.root}: {report.checked:,} blocks checked ({human_bytes(report.checked_bytes)}), "
    line += f"{len(report.bad):,} bad" if report.bad else "all sound"
    if report.leftovers:
        line += f"; {report.leftovers:,} unfinished files of dead writers{'' if dry_run else ' removed'}"
    if report.other_files:
        line += f"; {report.other_files:,} other files left alone"
    click.echo(line)


def _verify_json(reports: Iterable[tuple[CacheDirectory, VerifyReport]]) -> str:
    pairs = list(reports)
    rows = [
        {"directory": str(directory.root), "file": bad.path, "bytes": bad.file_bytes, "reason": bad.reason,
         "deleted": bad.deleted}
        for directory, report in pairs for bad in report.bad
    ]  # fmt: skip
    totals = {
        "checked": sum(report.checked for _, report in pairs),
        "checked_bytes": sum(report.checked_bytes for _, report in pairs),
        "bad": len(rows),
        "leftovers": sum(report.leftovers for _, report in pairs),
        "other_files": sum(report.other_files for _, report in pairs),
    }
    return json.dumps({"rows": rows, **totals}, indent=1)


def _json(listing: Listing, **more: int) -> str:
    rows = [
        {
            **row.info,
            "directory": str(directory.root),
            "scope": row.tag.hex(),
            "blocks": row.blocks,
            "bytes": row.file_bytes,
            "oldest_use_s": row.oldest_s,
            "newest_use_s": row.newest_s,
        }
        for directory, found in listing
        for row in found
    ]
    totals = {
        "blocks": sum(row.blocks for _, found in listing for row in found),
        "bytes": sum(row.file_bytes for _, found in listing for row in found),
    }
    return json.dumps({"rows": rows, **totals, **more}, indent=1)


def _total(rows: Sequence[ScopeRow]) -> str:
    blocks, size = sum(row.blocks for row in rows), sum(row.file_bytes for row in rows)
    return f"{blocks:,} blocks in {len(rows):,} scopes, {human_bytes(size)}" if rows else "empty"


def _cells(row: ScopeRow, now_s: float) -> tuple[str, ...]:
    info = row.info
    return (
        _clean(str(info.get("model", "unknown"))),
        _clean(str(info.get("revision", "-")))[:_SHORT_CHARS],
        _clean(str(info.get("kv_dtype", "-"))),
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
