"""The planner as files: a folder to open from disk or put on any web server, with no Python behind it."""

from __future__ import annotations

from pathlib import Path

from tiercel.errors import ConfigError
from tiercel.web import assets
from tiercel.web.planner import page


def export(folder: Path) -> list[Path]:
    """Write the page into `folder`, which is made if absent; files of an earlier export are replaced.

    Raises ConfigError where the folder holds anything else or cannot be written.
    """
    texts = {f"assets/{name}": assets.text(name) for name in (assets.SHARED, *page.FILES)}
    texts |= {"index.html": assets.text(page.PAGE), f"assets/{page.DATA_FILE}": page.data_script(static=True)}
    try:
        (folder / "assets").mkdir(parents=True, exist_ok=True)
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
        if foreign := sorted(there - texts.keys()):
            raise ConfigError(
                f"--export: {folder} holds {foreign[0]!r}; "
                "accepted: a new or empty folder or an earlier export"
            )
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--export: {folder}: {error.strerror}") from None
    return [folder / name for name in texts]
