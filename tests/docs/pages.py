"""The pages of the documentation and what stands in their code blocks, for the tests beside it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda page: page.relative_to(ROOT).as_posix()
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    return FENCE.sub("", text)


def fences(page: Path, *languages: str) -> Iterator[str]:
    for match in FENCE.finditer(page.read_text("utf-8")):
        if match[1] in languages:
            yield match[2]


def shell_lines(language: str, text: str) -> Iterator[str]:
    """The commands of a code block without comments; in a console what follows `$ `, to its quotes' end."""
    begun = ""
    for line in text.replace("\\\n", " ").splitlines():
        if begun:
            line = f"{begun}\n{line}"
        elif language == "console" and not line.startswith("$ "):
            continue
        line = re.sub(r"\s#\s.*$", "", line.removeprefix("$ "))
        begun = line if language == "console" and line.count("'") % 2 else ""
        if line and not begun:
            yield line


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of each `tiercel` command in a page's code blocks, without comments and pipes."""
    for match in FENCE.finditer(page.read_text("utf-8")):
        if match[1] not in ("console", "sh", "bash", ""):
            continue
        for line in shell_lines(match[1], match[2]):
            words = shlex.split(re.split(r"\s[|>]\s", line)[0], comments=True) if "tiercel" in line else []
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words[:1] == ["tiercel"]:
                yield words[1:]
