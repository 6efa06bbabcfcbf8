"""The OpenAPI description holds: whatever fits it is answered as it says, whatever does not is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="the schemathesis package is not installed")
from schemathesis.checks import load_all_checks  # noqa: E402

from tiercel.web.watch.endpoints import CACHE, HISTORY, OVERVIEW, STREAM  # noqa: E402
from tiercel.web.watch.openapi import description  # noqa: E402

from .running import TOKEN, Site, site_over_a_store, some_requests  # noqa: E402

load_all_checks()
MODES = {mode.value: mode for mode in schemathesis.GenerationMode}
# An endless answer is no case to generate; the stream has tests of its own.
CALLS = [(path, method) for path, item in description()["paths"].items() for method in item if path != STREAM]
# Only what takes something can be given something wrong.
CASES = [(*call, "positive") for call in CALLS] + [
    (path, method, "negative") for path, method in CALLS if method == "post" or path == HISTORY
]
FEW = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root: Path = tmp_path_factory.mktemp("described")
    with site_over_a_store(root) as site:
        some_requests(site.store)
        yield site


@pytest.fixture(scope="module")
def described(running: Site) -> Any:
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_the_description_holds(described: Any, path: str, method: str, mode: str) -> None:
    seen: set[int] = set()

    @FEW
    @given(case=described[path][method.upper()].as_strategy(generation_mode=MODES[mode]))
    def holds(case: Any) -> None:
        answer = case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=20)
        seen.add(answer.status_code)

    holds()
    # 404: a prefix that is well formed and unknown. Which cases were made must show in what came of them.
    assert seen & ({200, 404} if mode == "positive" else {400, 413, 415})


@pytest.mark.parametrize(("path", "method"), [call for call in CALLS if call[1] == "post"])
def test_without_the_token_nothing_is_done(described: Any, running: Site, path: str, method: str) -> None:
    before = running.store.stats().ram_blocks

    @FEW
    @given(case=described[path][method.upper()].as_strategy())
    def refused(case: Any) -> None:
        assert case.call(headers={"Authorization": "Bearer wrong"}, timeout=20).status_code == 401

    refused()
    assert running.store.stats().ram_blocks == before


def test_every_address_is_described(running: Site) -> None:
    assert set(description()["paths"]) == {OVERVIEW, STREAM, HISTORY, "/metrics", "/openapi.json", *CACHE}
    assert running.ask("/openapi.json").json() == description()
