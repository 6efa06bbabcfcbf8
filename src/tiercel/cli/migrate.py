"""`tiercel migrate`: settings of LMCache, or of vLLM's own offloading, as a `tiercel.toml`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tiercel.cli.serve import ENGINE_FLAGS, WithEngineFlags
from tiercel.config.units import parse_bytes
from tiercel.errors import ConfigError

_FILE = "tiercel.toml"


@click.command("migrate", cls=WithEngineFlags)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write to this file [default: to stdout]."
)
@click.option("--force", is_flag=True, help="Replace the file of -o.")
@click.option("--ranks", type=click.IntRange(1, 4096),
              help="Ranks of the engine on this host, for sizes that are per rank there.")  # fmt: skip
@click.option("--disk-size", metavar="SIZE", default="100GB", show_default=True,
              help="Size of a directory that has none there.")  # fmt: skip
@click.pass_context
def command(
    context: click.Context,
    file: Path | None,
    output: Path | None,
    force: bool,
    ranks: int | None,
    disk_size: str,
) -> None:
    """Turn settings of LMCache, or of vLLM's own offloading, into a tiercel.toml.

    \b
    tiercel migrate lmcache.yaml -o tiercel.toml
    tiercel migrate -- vllm serve MODEL --kv-offloading-size 64
    tiercel migrate -- lmcache server --l1-size-gb 60 --eviction-policy LRU

    FILE is LMCache's YAML file; LMCACHE_... variables go before it, as they do there. After -- stands the
    command line of vllm or of lmcache server. The result begins with what became of every option: taken over,
    for you to decide, not here, nothing to set, unknown. Passwords are not carried over.
    """
    from tiercel import migrate  # after --help, which must be quick
    from tiercel.migrate.lmcache import CONFIG_FILE_VARIABLE
    from tiercel.migrate.words import nothing_to_migrate, ranks_in

    try:
        parse_bytes(disk_size)
    except ConfigError as error:
        raise ConfigError(f"--disk-size: {error}") from None
    words: tuple[str, ...] = context.meta[ENGINE_FLAGS]
    named = os.environ.get(CONFIG_FILE_VARIABLE)
    source = file or (Path(named) if named else None)
    draft = migrate.Draft(disk_size=disk_size)
    given = migrate.from_yaml(source) if source is not None else []
    variables = migrate.from_environ(os.environ)
    given += variables
    found = [str(source)] if source is not None else []
    found += ["LMCACHE_... variables"] if variables else []
    found += [f"the command line of {'vllm' if words[0].startswith('-') else words[0]}"] if words else []
    given += migrate.translate_words(draft, words, str(output or _FILE), ranks)
    if not given and source is None and not draft.notes:
        raise nothing_to_migrate()
    if given or source is not None:
        migrate.translate(draft, given, ranks or ranks_in(words))
    text = draft.toml(" and ".join(found))
    if output is None:
        click.echo(text, nl=False)
        return
    replaced = _write(output, text, force)
    click.echo("\n".join([*draft.report(), f"{'replaced' if replaced else 'wrote'} {output}"]))


def _write(path: Path, text: str, force: bool) -> bool:
    """Write the file; returns whether there was one, which is a ConfigError unless `force`."""
    there = path.exists()
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"-o {path}: exists; accepted: a file that does not, or --force") from None
    except OSError as error:
        raise ConfigError(f"-o {path}: {error.strerror}") from None
    return there
