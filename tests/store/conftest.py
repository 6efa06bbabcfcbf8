"""The store's stories are told twice: of the store in the process, and of one behind a daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.store import support

_TOLD_TWICE = {
    "test_stories", "test_batches", "test_random", "test_choice", "test_keeping", "test_steering",
    "test_reports", "test_overview",
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in _TOLD_TWICE:
        metafunc.fixturenames.append("store_kind")
        metafunc.parametrize("store_kind", ["embedded", "daemon"], indirect=True)


@pytest.fixture
def store_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    support.HOW[0] = request.param
    yield
    support.HOW[0] = "embedded"
