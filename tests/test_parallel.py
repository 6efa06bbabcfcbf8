"""How `make test` hands out files: those that start vLLM as one piece, and first."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import STARTS_VLLM, pytest_collection_modifyitems

ROOT = Path(__file__).parents[1]


def test_every_file_that_starts_vllm_is_known() -> None:
    starting = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search("^from tests.engines.vllm.driver import", path.read_text(), re.MULTILINE)
    }
    assert starting == STARTS_VLLM


def test_they_come_first() -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

    names = ["tests/a.py::x", "tests/b.py::x", "tests/engines/vllm/test_serve.py::x", "tests/c.py::x"]
    items = [Item(name) for name in names]
    pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == [names[2], names[0], names[1], names[3]]
