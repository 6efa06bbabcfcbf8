"""A hook of mkdocs: the repository's pages outside `docs/` join the site, and links find them there.

Other files of the repository that a page links to (a dashboard, alert rules) are copied to `files/`. It
changes no text. A link to what does not exist is left as it is, and `mkdocs build --strict` refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Where a page is in the repository, and what it is called in the site.
PAGES = {
    "README.md": "index.md",
    "README.zh.md": "zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/sqlite-tier/README.md": "sqlite-tier.md",
}
_SOURCES = {site: source for source, site in PAGES.items()}
_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in `docs/`, and what pages link to."""
    from mkdocs.structure.files import File

    for source, site in PAGES.items():
        files.append(File.generated(config, site, content=(ROOT / source).read_text("utf-8")))
    for source in sorted(set(_linked_files())):
        files.append(File.generated(config, f"files/{source}", abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where their targets are in the site."""
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, site: str) -> str:
    """The text of the page `site`, its relative links turned from the repository's places to the site's."""
    folder = dirname(_SOURCES.get(site, f"docs/{site}"))

    def place(found: re.Match[str]) -> str:
        target = normpath(join(folder, found[2]))
        if target in PAGES:
            target = PAGES[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif (ROOT / target).is_file():
            target = f"files/{target}"
        else:
            return found[0]
        return f"{found[1]}{relpath(target, dirname(site) or '.')}{found[3]}"

    return _LINK.sub(place, markdown)


def _linked_files() -> Iterator[str]:
    """Files of the repository, outside `docs/`, that pages link to."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / source for source in PAGES)]
    for page in pages:
        folder = page.relative_to(ROOT).parent.as_posix()
        for link in _LINK.finditer(page.read_text("utf-8")):
            target = normpath(join(folder, link[2]))
            if not target.startswith(("docs/", "..")) and target not in PAGES and (ROOT / target).is_file():
                yield target
