"""One Chromium, one server and one export for the page's tests; skipped, saying why, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.browser import FLAGS, chromium


# Not for the session: while it lives its event loop runs in this thread, where others want theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium here: apt-get install chromium, or set CHROMIUM to one")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield found
        found.close()


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """The planner, with nothing to watch beside it."""
    serving = pytest.importorskip("tiercel.web.serving", reason="uvicorn or starlette is not installed")
    from tiercel.web.listening import bind
    from tiercel.web.watch.app import make_planner

    with serving.served(bind("127.0.0.1", 0), make_planner()) as url:
        yield f"{url}/plan"


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiercel.web.planner.export import export

    folder = tmp_path_factory.mktemp("page") / "export"
    export(folder)
    return folder
