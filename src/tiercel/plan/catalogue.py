"""The built-in models: the few fields of each configuration that decide its sizes, with their source.

Data in `catalogue.json`. A name is the published one (`org/name`), its last part, or that part without
a trailing `-instruct`, in any case. It never fetches anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from tiercel.errors import GeometryError
from tiercel.geometry.load import CONFIG_BYTES_MAX, config_of_text

UNCHECKED = "not compared with its config.json"
STDIN = "standard input"


@dataclass(frozen=True, slots=True)
class Model:
    """One model: its name, the fields of its configuration that matter here, and where they are from."""

    name: str
    config: Mapping[str, Any]
    source: str


@lru_cache(maxsize=1)
def models() -> Mapping[str, Model]:
    """All built-in models by their published name."""
    file = resources.files("tiercel.plan").joinpath("catalogue.json")
    entries = json.loads(file.read_text(encoding="utf-8"))
    return {name: Model(name, entry["config"], entry["source"]) for name, entry in entries.items()}


def _short(name: str) -> str:
    short = name.lower().rpartition("/")[2].removeprefix("meta-")
    for tail in ("-instruct", "-hf", "-base", "-it"):
        short = short.removesuffix(tail)
    return short


def find_model(name: str) -> Model | None:
    """The built-in model that `name` means, or None. An exact name wins over a short one."""
    known = models()
    lower = {full.lower(): model for full, model in known.items()}
    exact = lower.get(name.lower())
    if exact is not None:
        return exact
    wanted = _short(name)
    found = [model for full, model in known.items() if _short(full) == wanted]
    return found[0] if len(found) == 1 else None


def _standard_input() -> Mapping[str, Any]:
    try:
        text = sys.stdin.read(CONFIG_BYTES_MAX + 1)
    except UnicodeDecodeError:
        raise GeometryError(f"{STDIN}: not UTF-8 text; accepted: a model's config.json") from None
    return config_of_text(STDIN, text)


def open_model(name: str) -> tuple[str, Path | Mapping[str, Any], str]:
    """What MODEL means: a title, the configuration (or its path), and where it is from.

    `-` is standard input. An existing file or folder wins, then a built-in name. Raises GeometryError that
    names near matches.
    """
    if name == "-":
        return STDIN, _standard_input(), STDIN
    path = Path(name)
    try:
        there = path.exists()
    except (OSError, ValueError):
        there = False
    if there:
        return name, path, str(path)
    model = find_model(name)
    if model is not None:
        return model.name, model.config, model.source
    from difflib import get_close_matches  # only a misspelt name pays for it

    shorts = {_short(full): full for full in models()}
    near = [shorts[key] for key in get_close_matches(_short(name), shorts, n=3, cutoff=0.5)]
    hint = f" (near: {', '.join(near)})" if near else ""
    raise GeometryError(
        f"model: {name!r} is no file, folder or built-in name{hint}; "
        f"accepted: a config.json, a model folder, or one of {len(shorts)} names (tiercel size --list)"
    )
