"""`tiercel daemon`: the store as a process of its own, shared by the engines of a host."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import click
import msgspec

from tiercel.cli.daemon_http import http_beside
from tiercel.cli.notify import notify
from tiercel.cli.options import accept_lossy_option, config_options, load_config, log_format_option
from tiercel.config import Config, default_socket, human_bytes, parse_seconds


@click.group("daemon", invoke_without_command=True)
@click.option("--socket", "path", type=click.Path(path_type=Path), help="Unix socket to serve on.")
@click.option("--exit-when-idle", metavar="TIME", help="End when no engine was connected for so long.")
@click.option("--http", metavar="HOST:PORT", help="Serve a dashboard and /metrics there too.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="Token for its buttons; else one is made."
)
@accept_lossy_option
@log_format_option
@config_options
@click.pass_context
def command(
    context: click.Context,
    path: Path | None,
    exit_when_idle: str | None,
    http: str | None,
    token_file: Path | None,
    accept_lossy: bool,
    log_format: str,
    config_file: Path | None,
    settings: Sequence[str],
) -> None:
    """Keep one store for all engines of this host, in the foreground until SIGTERM or Ctrl-C.

    \b
    tiercel daemon --set ram.size=16GiB
    tiercel daemon --config /etc/tiercel.toml
    tiercel daemon --http 127.0.0.1:8090
    tiercel daemon status

    Engines find it by the same daemon.socket. Their KV stays when they end; disk tiers also stay when the
    daemon ends, which writes down what is due first.
    """
    flags = {
        "daemon.socket": None if path is None else str(path),
        "store.accept_lossy": "yes" if accept_lossy else None,
    }
    config = load_config(config_file, settings, flags)
    socket_path = config.daemon.socket or default_socket()
    if context.invoked_subcommand is not None:
        context.obj = socket_path
        return
    idle_exit_s = None if exit_when_idle is None else parse_seconds(exit_when_idle)
    from tiercel.service.logs import set_up

    set_up(log_format)
    _serve(config, socket_path, idle_exit_s, http, token_file)


@command.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_obj
def status(socket_path: Path, as_json: bool) -> None:
    """Say how the daemon is: clients, blocks, tiers, hits. Exit code 2 when there is none."""
    from tiercel.service.connecting import reach

    with reach(socket_path) as store:
        figures = store.figures()
    if figures is None:
        raise click.ClickException(f"daemon at '{socket_path}' does not answer")
    if as_json:
        plain = msgspec.to_builtins(figures)
        click.echo(
            json.dumps({name: plain[name] for name in ("pid", "clients", "uptime_s", "stats")}, indent=2)
        )
        return
    click.echo(
        f"daemon {figures.pid} at {socket_path}: up {figures.uptime_s:.0f} s, {figures.clients} clients"
    )
    if figures.stats is None:
        click.echo("  no engine has opened the store yet")
        return
    stats, counters = figures.stats, figures.stats.counters
    click.echo(
        f"  ram: {stats.ram_blocks} blocks of {human_bytes(stats.slot_bytes)}, "
        f"{stats.slots - stats.slots_free} of {stats.slots} slots in use, "
        f"{stats.leases} leases, {stats.pins} pins"
    )
    for tier in stats.tiers:
        cap = "no cap" if tier.cap_bytes is None else f"of {human_bytes(tier.cap_bytes)}"
        click.echo(
            f"  {tier.name}: {tier.blocks} blocks, {human_bytes(tier.used_bytes)} {cap}, "
            f"breaker {tier.breaker}, {tier.pending_writes} writes wait"
        )
    click.echo(
        f"  blocks since start: {counters.looked_up} looked up, {counters.hit} hit, "
        f"{counters.stored} stored, "
        f"{counters.stores_skipped} not stored, {counters.loads_failed} loads failed"
    )


def _serve(
    config: Config, socket_path: Path, idle_exit_s: float | None, http: str | None, token_file: Path | None
) -> None:
    from tiercel.service import Daemon

    daemon = Daemon(config, socket_path)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.stop())
    click.echo(f"serving on {socket_path}  (SIGTERM or Ctrl-C ends it)")
    notify("READY=1")
    try:
        with http_beside(daemon, http, token_file) if http else nullcontext():
            daemon.run(idle_exit_s=idle_exit_s)
    finally:
        notify("STOPPING=1")
        flushed = daemon.close()
    if not flushed:
        logging.getLogger("tiercel").warning("not everything could be written down before the deadline")
