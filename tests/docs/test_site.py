"""The documentation's site: what is made from the code is up to date, all of it builds, without a network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from scripts.browser import chromium
from scripts.docs_pages import DOCS, PAGES, commands
from scripts.docs_pictures import PICTURES, WIDTH
from scripts.docs_site import ROOT, relinked
from tests.service.running import environ

# ---- made from the code


@pytest.mark.parametrize("name", PAGES)
def test_what_is_made_from_the_code_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == PAGES[name](), "run: make docs"


def test_every_command_and_option_is_in_the_reference() -> None:
    page = PAGES["cli.md"]()
    for name, command in commands():
        assert f"\n### `tiercel {name}`\n" in page
        section = page.split(f"\n### `tiercel {name}`\n")[1].split("\n### ")[0]
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert [flag for flag in option.opts if flag not in section] == [], name


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_whole_and_stay_in_their_frame(name: str) -> None:
    drawn = ElementTree.fromstring(PICTURES[name]())
    height = float(drawn.attrib["height"])
    texts = [one for one in drawn.iter() if one.tag.endswith("}text")]
    assert texts
    for one in texts:
        # A letter is at most 0.6 of its size wide on average in the fonts named.
        wide = len(one.text or "") * 0.56 * (12 if one.get("class") in ("soft", "number") else 14)
        at, anchor = float(one.attrib["x"]), one.get("text-anchor")
        left = {"start": at, "middle": at - wide / 2, "end": at - wide}[str(anchor)]
        assert left >= 8, one.text
        assert left + wide <= WIDTH - 8, one.text
        assert 10 <= float(one.attrib["y"]) <= height - 8, one.text


# ---- links between the repository's places and the site's


@pytest.mark.parametrize(
    ("site", "link", "there"),
    [
        ("index.md", "docs/serve.md#ask-it", "serve.md#ask-it"),
        ("index.md", "CHANGELOG.md", "changelog.md"),
        ("zh.md", "README.md", "index.md"),
        ("architecture.md", "../CONTRIBUTING.md", "contributing.md"),
        ("decisions/eviction.md", "../benchmarks.md#x", "../benchmarks.md#x"),
        ("sqlite-tier.md", "../../docs/tiers.md#write-your-own", "tiers.md#write-your-own"),
        ("tiers.md", "../examples/sqlite-tier/README.md", "sqlite-tier.md"),
        ("tiers.md", "../pyproject.toml", "files/pyproject.toml"),
        ("decisions/eviction.md", "../../pyproject.toml", "../files/pyproject.toml"),
        ("tiers.md", "../src/none.py", "../src/none.py"),
        ("tiers.md", "https://example.org/a", "https://example.org/a"),
    ],
)
def test_links_are_turned_to_the_sites_places(site: str, link: str, there: str) -> None:
    assert relinked(f"see [a]({link}).", site) == f"see [a]({there})."


# ---- the site

needs_mkdocs = pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed")
# What a browser would fetch to show a page.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|link|source)\b[^>]*?\s(?:src|href)="?((?:https?:)?//[^"\s>]+)"""
)


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    # With --quiet mkdocs does not count the warnings that --strict ends with.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    command += ["--config-file", str(config)]
    quiet = environ({"NO_MKDOCS_2_WARNING": "1"})
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=quiet)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@needs_mkdocs
def test_the_site_builds_with_every_page_and_no_broken_link(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).is_file()
    assert "Prefill once, resume anywhere" in (site / "index.html").read_text("utf-8")


@needs_mkdocs
def test_the_site_asks_no_other_server(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert FETCHED.findall(page.read_text("utf-8")) == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text("utf-8")), sheet


def test_what_pages_would_fetch_from_elsewhere_is_found() -> None:
    text = '<script src="https://a.example/x.js"></script><link rel="icon" href="x.png"><a href="https://b.example">'
    assert FETCHED.findall(text) == ["https://a.example/x.js"]


@needs_mkdocs
def test_the_site_can_be_searched_from_a_disk(site: Path) -> None:
    text = next(site.glob("search/search_index.js*")).read_text("utf-8")
    rows = json.loads(text[text.index("{") :])["docs"]
    assert any("second-sight" in row["text"] for row in rows)


# In a process of its own: of Playwright's sync API there may be one at a time.
SEARCH = """
import sys
from playwright.sync_api import sync_playwright
from scripts.browser import FLAGS, chromium
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
    page = browser.new_page()
    elsewhere = []
    page.on("request", lambda asked: elsewhere.append(asked.url) if asked.url.startswith("http") else None)
    page.goto(sys.argv[1])
    page.locator("input.md-search__input").first.click()
    page.keyboard.type(sys.argv[2])
    found = page.locator(".md-search-result__item a").first
    found.wait_for(timeout=30_000)
    print(found.get_attribute("href"), elsewhere)
    browser.close()
"""


@needs_mkdocs
@pytest.mark.skipif(chromium() is None, reason="no Chromium here: apt-get install chromium, or set CHROMIUM")
def test_a_browser_finds_pages_of_the_site_on_a_disk(site: Path) -> None:
    command = [sys.executable, "-c", SEARCH, f"{site.as_uri()}/index.html", "allkeys"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ())
    assert done.returncode == 0, done.stderr
    where, elsewhere = done.stdout.strip().split(" ", 1)
    assert where.startswith(f"{site.as_uri()}/tiers.html"), where
    assert elsewhere == "[]"


@needs_mkdocs
def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[b](no.md) [c](#no)\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text("site_name: A\nvalidation: {anchors: warn}\n")
    done = build(tmp_path / "out", config)
    assert done.returncode != 0
    assert "no.md" in done.stdout + done.stderr
