"""`tiercel dashboard`: a store at work in a browser, and the planner beside it; or the planner as files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tiercel.config import default_socket
from tiercel.errors import ConfigError

if TYPE_CHECKING:
    from tiercel.web.watch.sources import Source

_NAMED = ("--host", "--port")


@click.command("dashboard")
@click.option("--socket", type=click.Path(path_type=Path), help="Watch the daemon behind this socket.")
@click.option("--url", help="Watch a tiercel serve, or a daemon with --http, such as http://127.0.0.1:8000.")
@click.option("--demo", is_flag=True, help="Watch a small store of its own with made-up traffic.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8089, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one."
)
@click.option("--token-file", type=click.Path(path_type=Path), help="Token for buttons; else one is made.")
@click.option("--allow-host", "hosts", multiple=True, help="A name by which others may ask for the page.")
@click.option("--export", "folder", type=click.Path(path_type=Path), help="Write the planner here and end.")
def command(
    socket: Path | None,
    url: str | None,
    demo: bool,
    host: str,
    port: int,
    token_file: Path | None,
    hosts: Sequence[str],
    folder: Path | None,
) -> None:
    """Show a store at work in a browser: tiers and what moves between them, hits, time saved, faults.

    \b
    tiercel dashboard --demo
    tiercel dashboard --socket /run/tiercel/daemon.sock
    tiercel dashboard --url http://127.0.0.1:8000

    Without any of them it watches the daemon behind the default socket, if one is there; else it shows the
    planner alone. Buttons that change something need the token.
    """
    chosen = [name for name, given in (("--socket", socket), ("--url", url), ("--demo", demo)) if given]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} given; accepted is one of them")
    if folder is not None:
        _export(folder)
        return
    if not chosen and default_socket().is_socket():
        socket = default_socket()
    _serve(socket, url, demo, host, port, token_file, hosts)


def _export(folder: Path) -> None:
    from tiercel.web.planner.export import export

    written = export(folder)
    size_bytes = sum(path.stat().st_size for path in written)
    click.echo(f"wrote {len(written)} files, {size_bytes / 1e3:.0f} kB; open {folder / 'index.html'}")


def _serve(
    socket: Path | None, url: str | None, demo: bool, host: str, port: int, token_file: Path | None,
    hosts: Sequence[str],
) -> None:  # fmt: skip
    from tiercel.service.logs import set_up

    try:
        from tiercel.web import serving
        from tiercel.web.listening import bind, is_open_to_others, url_of
        from tiercel.web.watch import app
        from tiercel.web.watch.guard import Guard
        from tiercel.web.watch.token import make_token, read_token
        from tiercel.web.watch.watch import Watch
    except ImportError as error:
        raise ConfigError(
            f"dashboard: {error.name} is not installed; "
            "accepted: pip install 'tiercel[dashboard]', or --export DIR"
        ) from None
    token = None if token_file is None else read_token(token_file)
    set_up("text")
    with ExitStack() as stack:
        listener = stack.enter_context(bind(host, port, _NAMED))
        source = stack.enter_context(_source(socket, url, demo))
        click.echo(f"{url_of(listener)}/  (Ctrl-C ends it)")
        if source is None:
            click.echo(
                "nothing to watch: this is the planner. Accepted: --demo, --socket PATH of a tiercel daemon, "
                "--url of a tiercel serve"
            )
            serving.serve(listener, app.make_planner())
            return
        if url is None and token is None:
            token = make_token()
            click.echo(f"token for its buttons: {token}")
        if is_open_to_others(listener):
            click.echo(
                "tiercel: warning: others can look at it; the token protects only its buttons", err=True
            )
        watch = Watch(source)
        stack.callback(watch.close)
        watch.start()
        # What another server is asked to do, it judges itself, by the token of whoever asks.
        guard = Guard(None if url is not None else token, hosts=frozenset(hosts))
        serving.serve(listener, app.make_site(watch, guard), watch.end_streams)


@contextmanager
def _source(socket: Path | None, url: str | None, demo: bool) -> Iterator[Source | None]:
    from tiercel.web.watch.elsewhere import ServerSource
    from tiercel.web.watch.sources import DaemonSource, StoreSource

    if demo:
        from tiercel.demo.traffic import demo_store, traffic

        with demo_store() as store, traffic(store):
            yield StoreSource(lambda: store, "demo", "made-up traffic")
        return
    source: Source | None = None
    if socket is not None:
        source = DaemonSource(socket)
    elif url is not None:
        source = ServerSource(url)
    try:
        yield source
    finally:
        if source is not None:
            source.close()
