"""`tiercel dashboard`: the calculator and planner in a browser, served here or written as files."""

from __future__ import annotations

from pathlib import Path

import click

from tiercel.errors import ConfigError


@click.command("dashboard")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8089, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one."
)
@click.option("--export", "folder", type=click.Path(path_type=Path), help="Write the page here and end.")
def command(host: str, port: int, folder: Path | None) -> None:
    """Serve the calculator and planner as a page; with --export write one that needs no server."""
    if folder is not None:
        from tiercel.web.export import export

        written = export(folder)
        size_bytes = sum(path.stat().st_size for path in written)
        click.echo(f"wrote {len(written)} files, {size_bytes / 1e3:.0f} kB; open {folder / 'index.html'}")
        return
    _serve(host, port)


def _serve(host: str, port: int) -> None:
    try:
        from tiercel.web import serving
    except ImportError as error:
        raise ConfigError(
            f"dashboard: {error.name} is not installed; "
            "accepted: pip install 'tiercel[dashboard]', or --export DIR"
        ) from None
    with serving.listen(host, port) as listener:
        click.echo(f"{serving.address_of(listener)}/  (Ctrl-C ends it)")
        serving.serve(listener)
