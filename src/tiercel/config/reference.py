"""The reference page of all settings, made from their declarations so that it cannot drift from them."""

from __future__ import annotations

import dataclasses

from tiercel.config.schema import TIERS, Entry, entries
from tiercel.config.sources import variable_of
from tiercel.config.values import accepted, text_of

_HEAD = """\
# Configuration

<!-- Made by `make docs` from src/tiercel/config/schema.py; a test fails when it is out of date. -->

Settings come from a TOML file (`--config FILE` or `TIERCEL_CONFIG`), then environment variables, then
flags (`--set ram.size=4GiB`); later ones win. Sizes and durations carry a unit (`4GiB`, `500MB`, `10s`,
`250ms`); a bare number is refused. An unknown name is refused with the nearest known one, in the file and
among variables that begin with `TIERCEL_`. An empty variable counts as not set. Relative paths in a file
are taken from the file's directory.

```toml
[ram]
size = "4GiB"

[[tiers]]
path = "/var/cache/tiercel"
size = "100GB"
```

Which kinds of tiers there are and what their URLs may say is in [tiers](tiers.md).
Tiers are numbered from 0 in variables and flags: `TIERCEL_TIERS_0_PATH`, `--set tiers.0.path=...`.
Three more variables are read: `TIERCEL_CONFIG` names the file, `TIERCEL_CACHE_DIR` the directory for
things that can be made again, such as the demo model (default `~/.cache/tiercel`), and `TIERCEL_API_KEY` the
key that clients of `tiercel serve` must show (default none; it is in no file and is never printed).
"""


def reference_page() -> str:
    """Return the page as Markdown: one table per section, one row per setting."""
    parts = [_HEAD]
    section = ""
    for entry in entries():
        if entry.section != section:
            section = entry.section
            parts.append(f"\n## `{'[[tiers]]' if section == TIERS else f'[{section}]'}`\n\n")
            parts.append("| setting | default | what it is | accepted | variable |\n|---|---|---|---|---|\n")
        parts.append(_row(entry))
    return "".join(parts)


def _row(entry: Entry) -> str:
    default = (
        "required" if entry.default is dataclasses.MISSING else f"`{text_of(entry.setting, entry.default)}`"
    )
    index = ".0" if entry.section == TIERS else ""
    variable = variable_of(f"{entry.section}{index}.{entry.name}")
    return (
        f"| `{entry.name}` | {default} | {entry.setting.doc} | {accepted(entry.setting)} | `{variable}` |\n"
    )
