"""Pages of integrations: what to type first, how to see that it works last, what was tested how."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.pages import FENCE, ROOT

PAGES = ["vllm", "vllm-secondary", "sglang", "serve", "kserve", "llm-d", "kubernetes", "migration", "python"]
SEE = "See that it works"
TESTED = re.compile(r"What was (tested|tried)\b.*")
# A reader must not look for it: title, a few lines, then what to type.
FIRST_LINES = 16
HOW = re.compile(r"real|schema|simulated|stand-in|held against|rendered|compared with", re.IGNORECASE)
VERSION = re.compile(r"\b\d+\.\d+\b|\bv1alpha\d\b|autumn 2026")


def wrong_with(text: str) -> list[str]:
    """What a page of an integration lacks."""
    wrong = []
    begin = text.split("\n## ")[0].splitlines()[:FIRST_LINES]
    if not any(line.startswith("```") for line in begin):
        wrong.append("nothing to type at the beginning")
    headings = re.findall(r"^## (.+)$", FENCE.sub("", text), re.MULTILINE)
    if len(headings) < 2 or headings[-2] != SEE or not TESTED.fullmatch(headings[-1]):
        wrong.append(f"does not end with '{SEE}' and 'What was tested how', but with {headings[-2:]}")
        return wrong
    see, tested = text.split(f"\n## {SEE}\n")[1].split(f"\n## {headings[-1]}\n")
    if not (FENCE.search(see) or "`" in see):
        wrong.append("no command or figure to see it by")
    if not HOW.search(tested):
        wrong.append("does not say how it was tested")
    if not VERSION.search(tested):
        wrong.append("names no version")
    return wrong


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_an_integration_has_the_shape(name: str) -> None:
    assert wrong_with((ROOT / "docs" / f"{name}.md").read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda text: text.replace("```", "~~~", 2), "nothing to type"),
        (lambda text: text.replace(f"## {SEE}", "## Proof"), "does not end with"),
        (lambda text: text + "\n## More\n\nwords\n", "does not end with"),
        (lambda text: VERSION.sub("some", text), "names no version"),
        (lambda text: HOW.sub("somehow", text), "how it was tested"),
    ],
)
def test_a_page_without_it_is_found(change: object, word: str) -> None:
    assert callable(change)
    text = Path(ROOT / "docs" / "llm-d.md").read_text("utf-8")
    assert any(word in one for one in wrong_with(change(text)))
