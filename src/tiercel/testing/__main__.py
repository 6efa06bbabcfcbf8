"""`python -m tiercel.testing KIND --url URL`: run the tier contract on any kind of tier, a line per check.

Ends with 0 when all checks passed, 1 when one failed, 2 when it could not begin.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tiercel.config import Config
from tiercel.config.schema import FILES, MEMORY, TIER_KINDS
from tiercel.errors import TiercelError, TierError
from tiercel.testing.place import Place

if TYPE_CHECKING:
    import pytest

_PREFIX = "test_"
# Of kinds that must have one.
_SIZES = {FILES: "1TiB", MEMORY: "64MiB"}


class Reporter:
    """A pytest plugin: the place for the suite, and one line per check instead of pytest's own output."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    def pytest_configure(self, config: pytest.Config) -> None:
        """A failure in a few lines; the option itself belongs to the plugin that this one replaces."""
        config.option.tbstyle = "short"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say what became of a check: once for its call, and for a set-up that failed."""
        if report.passed and report.when == "call":
            self.passed += 1
            click.echo(f"ok    {_title(report.nodeid)}")
        elif report.failed:
            self.failed += 1
            click.echo(f"FAIL  {_title(report.nodeid)}")
            click.echo("\n".join(f"      {line}" for line in report.longreprtext.splitlines()))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A suite that cannot be read is no suite that passed."""
        if report.failed:
            self.failed += 1
            click.echo(f"FAIL  {report.longreprtext}")


def run(args: Sequence[str] | None = None) -> int:
    """Parse `args`, run the suite, return the exit code."""
    try:
        place = _place(_arguments(args))
        place.refuse_used()
        reporter = _run(place)
        place.empty(place.open())
    except TiercelError as error:
        click.echo(f"tiercel: error: {' '.join(str(error).split())}", err=True)
        return error.exit_code
    click.echo(f"{reporter.passed} checks passed, {reporter.failed} failed")
    return 0 if reporter.passed and not reporter.failed else 1


def _arguments(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tiercel.testing",
        description="Run the tier contract on a place that is empty. The suite fills and empties it.",
    )
    parser.add_argument("kind", help=f"{', '.join(TIER_KINDS)}, or the name of an entry point")
    parser.add_argument("--url", help="where the place is (every kind but files and memory)")
    parser.add_argument("--path", help="an empty or new directory (files)")
    parser.add_argument(
        "--encrypt", metavar="SOURCE", help="also encrypt: file:PATH, env:NAME or command:..."
    )
    return parser.parse_args(args)


def _place(given: argparse.Namespace) -> Place:
    settings = {
        "kind": given.kind,
        "url": given.url,
        "path": given.path,
        "size": _SIZES.get(given.kind),
        "encrypt": given.encrypt,
        "required": True,
    }
    flags = {f"tiers.0.{name}": value for name, value in settings.items()}
    return Place(Config.load(environ={}, overrides=flags).tiers[0])


def _run(place: Place) -> Reporter:
    try:
        import hypothesis  # noqa: F401 (named when missing, before pytest stumbles over it)
        import pytest
    except ImportError as fault:
        raise TierError(f"{fault.name} is not installed; accepted: pip install 'tiercel[testing]'") from None

    class Given(Reporter):
        @pytest.fixture
        def place(self) -> Place:
            return place

    reporter = Given()
    # Settings and plugins of wherever this is run must not change what the contract is.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    suite = Path(__file__).with_name("suite.py")
    options = [
        "-c",
        os.devnull,
        "--rootdir",
        str(suite.parent),
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
    ]
    pytest.main([*options, "--import-mode=importlib", str(suite)], plugins=[reporter])
    return reporter


def _title(node: str) -> str:
    return node.rpartition("::")[2].removeprefix(_PREFIX).replace("_", " ")


if __name__ == "__main__":
    sys.exit(run())
