"""A site over a small store of its own, as a real server; what it is asked goes over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tiercel.web.watch import watch as watch_module

from .running import Site, site_over_a_store


@pytest.fixture(autouse=True, scope="session")
def _quick() -> Iterator[None]:
    """Read ten times as often: the tests wait for what is read next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch_module, "TICK_S", watch_module.TICK_S / 10)
        patch.setattr(watch_module, "EVERY_S", watch_module.EVERY_S / 10)
        patch.setattr(watch_module, "FRESH_S", 0.0)
        yield


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A new one, whose figures begin at nothing."""
    with site_over_a_store(tmp_path / "disk") as running:
        yield running


@pytest.fixture(scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_over_a_store(tmp_path_factory.mktemp("kept")) as running:
        yield running


@pytest.fixture
def emptied(_kept: Site) -> Site:
    """One for all tests of a module, without blocks or pins."""
    _kept.store.clear()
    return _kept
