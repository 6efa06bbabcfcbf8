"""README.md and README.zh.md say the same: the same commands, figures and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d,.]*\d|\d")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
EACH_OTHER = {"README.md", "README.zh.md"}


def code(text: str) -> list[list[str]]:
    """The lines of each code block without their comments."""
    return [
        [
            stripped
            for line in body.splitlines()
            if (stripped := re.sub(r"\s+#\s.*$|^#\s.*$", "", line).rstrip())
        ]
        for _, body in FENCE.findall(text)
    ]


def figures(text: str) -> Counter[str]:
    """Every number outside code blocks and links."""
    return Counter(NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", FENCE.sub("", text))))


def targets(text: str) -> Counter[str]:
    found = LINK.findall(FENCE.sub("", text))
    return Counter(one for one in found if one not in EACH_OTHER and not one.startswith("#"))


def spans(text: str) -> Counter[str]:
    return Counter(SPAN.findall(FENCE.sub("", text)))


def readmes() -> tuple[str, str]:
    return (ROOT / "README.md").read_text("utf-8"), (ROOT / "README.zh.md").read_text("utf-8")


def test_commands_agree() -> None:
    english, chinese = map(code, readmes())
    assert english
    assert chinese == english


def test_figures_agree() -> None:
    english, chinese = map(figures, readmes())
    assert len(english) > 20
    assert (english - chinese, chinese - english) == (Counter(), Counter())


def test_links_agree() -> None:
    english, chinese = map(targets, readmes())
    assert set(english) == set(chinese)


def test_names_in_the_text_agree() -> None:
    english, chinese = map(spans, readmes())
    assert set(english) == set(chinese)


def test_each_leads_to_the_other() -> None:
    english, chinese = readmes()
    assert "](README.zh.md)" in english
    assert "](README.md)" in chinese


def test_differences_are_found() -> None:
    one = "# A\n\n1,234 tokens, 28x\n\n```console\n$ make demo   # see\n```\n"
    assert code(one) == code(one.replace("# see", "# 看"))
    assert code(one) != code(one.replace("make demo", "make test"))
    assert figures(one) != figures(one.replace("28x", "29x"))
    assert figures(one) == figures(one.replace("tokens", "个词元"))
    with pytest.raises(AssertionError):
        assert targets("[a](b.md)") == targets("[a](c.md)")
