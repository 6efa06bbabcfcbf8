"""Running the doctor in this process: findings by group and name."""

from __future__ import annotations

from pathlib import Path

from tiercel.config import Config
from tiercel.doctor import Checked, Finding, Questions, examine
from tiercel.doctor.worth import Prefill

NOWHERE = Path("/nonexistent/daemon.sock")


def config(**settings: str) -> Config:
    """A small arena and these settings, `tiers__0__path` for `tiers.0.path`."""
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    return Config.load(None, {}, {"ram.size": "16MiB", "ram.slot": "132KiB", **dotted})


def disk(path: Path, **settings: str) -> Config:
    """One tier of files."""
    return config(tiers__0__path=str(path), tiers__0__size="64MiB", **settings)


def looked(
    made: Config,
    *,
    socket: Path = NOWHERE,
    named: bool = False,
    quick: bool = False,
    deadline_s: float = 10.0,
    prefill: Prefill | None = None,
) -> list[Checked]:
    """All that the doctor says."""
    asked = Questions(
        config=made, socket=socket, socket_named=named, quick=quick, deadline_s=deadline_s,
        prefill=prefill or Prefill(),
    )  # fmt: skip
    return list(examine(asked))


def of(checks: list[Checked], group: str) -> dict[str, Finding]:
    """The findings of one group by name."""
    return {one.name: one.finding for one in checks if one.group.startswith(group)}


def verdicts(checks: list[Checked], group: str) -> dict[str, str]:
    return {name: finding.verdict.value for name, finding in of(checks, group).items()}
