"""docs/metrics.md has every metric that is exported, with its type and labels, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.service.test_prometheus import exported, many_tiers
from tests.web.api.conftest import StubStore

from tiercel.store import StoreStats
from tiercel.web.api.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text()
Row = tuple[str, str, tuple[str, ...]]
UNITS = {"bytes", "seconds", "tokens", "blocks", "requests"}


class OneTier(StubStore):
    def stats(self) -> StoreStats:
        return many_tiers(1)


def on_the_page() -> Iterator[tuple[Row, str, str]]:
    for line in PAGE.splitlines():
        if match := re.fullmatch(r"\| `([\w:]+)` \| (\w+) \| (.*?) ?\| (.+?) \| (.+) \|", line):
            name, kind, labels, unit, words = match.groups()
            yield (name, kind, tuple(re.findall(r"`(\w+)`", labels))), unit, words


def exported_rows() -> Iterator[Row]:
    store: Any = OneTier()
    metrics = Metrics(store, 3, lossy=("int8",))
    metrics.requests.labels("/v1/models", "200")
    metrics.seconds.labels("/v1/models")
    metrics.ttft.labels("ram")
    for family in metrics.registry.collect():
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        total = "_total" if family.type == "counter" else ""
        yield family.name + total, family.type, tuple(sorted(labels))


def of_vllm() -> Iterator[Row]:
    # Read, not imported: that would load vLLM.
    source = ast.parse((ROOT / "src/tiercel/engines/vllm/stats.py").read_text())
    for node in source.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COUNTERS":
            for name in ast.literal_eval(node.value):
                yield f"vllm:tiercel_{name}_total", "counter", ()


def test_the_table_is_what_is_exported() -> None:
    rows = [row for row, _, _ in on_the_page()]
    assert len(rows) == len(set(rows)) > 70
    expected = [*exported_rows(), *of_vllm()]
    assert sorted(rows) == sorted(expected)


def test_units_are_those_in_the_names() -> None:
    for (name, _, _), unit, words in on_the_page():
        last = name.removesuffix("_total").rsplit("_", 1)[-1]
        if last in UNITS and not name.startswith("vllm"):
            assert unit == last, name
        assert words.endswith("."), name


def test_labels_are_explained_and_the_numbers_of_series_true() -> None:
    labels = {label for (name, _, labels), _, _ in on_the_page() if "http" not in name for label in labels}
    assert [label for label in sorted(labels - {"state"}) if f"| `{label}` |" not in PAGE] == []
    none, one = (len(exported(many_tiers(count))) for count in (0, 1))
    assert f"{none} for the store and {one - none} for each tier" in PAGE
