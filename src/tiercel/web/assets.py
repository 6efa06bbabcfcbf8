"""The site's own files, shipped inside the package: their names, texts and types.

A name is a key of a list, never a path; nothing here opens anything else. Imports nothing heavy.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

_TYPES = {"css": "text/css", "js": "text/javascript", "html": "text/html"}
_LIVE = "charts dom feed figures flow format main steer tables".split()
SHARED = "site.css"
PAGES = ("live.html", "plan.html")
FILES = (SHARED, "plan.css", "plan.js", "live.css", *(f"live/{name}.js" for name in _LIVE))


@lru_cache(maxsize=64)
def text(name: str) -> str:
    """One of the site's files. Raises KeyError for any other name."""
    if name not in FILES and name not in PAGES:
        raise KeyError(name)
    return resources.files("tiercel.web").joinpath("static", name).read_text(encoding="utf-8")


def kind(name: str) -> str:
    """The media type of a file, by the end of its name."""
    return _TYPES[name.rpartition(".")[2]]
