"""What all tests share: the demo model's folder, and an environment without the caller's own settings."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tiercel.config.paths import CACHE_DIR_VARIABLE
from tiercel.config.sources import PREFIX
from tiercel.models import demo_model_dir

# Files that start vLLM: two of its engines side by side on two cores wait for each other until something
# gives up. Of a parallel run one worker has them all, and begins with them.
STARTS_VLLM = frozenset({
    "tests/engines/vllm/test_engine.py",
    "tests/engines/vllm/test_engine_kinds.py",
    "tests/engines/vllm/test_faults.py",
    "tests/engines/vllm/test_lossy.py",
    "tests/engines/vllm/test_serve.py",
    "tests/engines/vllm/test_shared_tiers.py",
})  # fmt: skip

# Nothing here may fetch anything; set before any library that would looks at it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Started in the background of a shell, we and our children would be deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two loaded cores make single examples slow at random; the number of examples bounds the time instead.
settings.register_profile(
    "tiercel", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("soak", parent=settings.get_profile("tiercel"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tiercel"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, a worker has a whole file at a time, or all that start vLLM."""
    from xdist.scheduler import LoadFileScheduling

    class OneEngineAtATime(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "vLLM" if file in STARTS_VLLM else file

    return OneEngineAtATime(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest as one piece comes first."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in STARTS_VLLM)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away `TIERCEL_...` settings of the shell that runs the tests, but not where the model is kept."""
    for name in list(os.environ):
        if name.startswith(PREFIX) and name != CACHE_DIR_VARIABLE:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def _no_sockets_left_behind() -> Iterator[None]:
    """Engines that are killed leave their sockets. The path is short: a socket's has 108 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="tiercel-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_RPC_BASE_PATH", folder)
        yield


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A test that sets up logging, as servers and engines do, does not decide what later ones see."""
    logging.getLogger("tiercel").filters.clear()
    loggers = (logging.getLogger(), logging.getLogger("tiercel"))
    before = [(one, one.level, list(one.handlers), list(one.filters)) for one in loggers]
    exceptions, thread_ended = logging.raiseExceptions, threading.excepthook
    yield
    logging.raiseExceptions, threading.excepthook = exceptions, thread_ended
    for one, level, handlers, filters in before:
        one.setLevel(level)
        one.handlers[:], one.filters[:] = handlers, filters


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The folder of the real demo model, prepared on first use. Mark tests that use it with `model`."""
    return demo_model_dir()
