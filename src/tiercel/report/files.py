"""Reports as files: JSON read back with its format checked, and what is asked for written. Knows not what
is in them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from tiercel.errors import ConfigError


class _Report(Protocol):
    @property
    def format(self) -> int: ...


R = TypeVar("R", bound=_Report)


def read_json(path: Path, kind: type[R], number: int, maker: str, bytes_max: int) -> R:
    """A report of format `number` that `maker` (a command) wrote. Raises ConfigError for what is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        report: Any = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is no report ({error}); accepted: what {maker} wrote") from None
    if report.format != number:
        raise ConfigError(f"{path}: has format {report.format}; accepted: {number}")
    found: R = report
    return found


def check_output(flag: str, path: Path | None) -> None:
    """Refuse at once a file that could not be written at the end of a run of minutes. Raises ConfigError."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag}: '{path}' is a directory; accepted: a file name")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: directory '{path.parent}' does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: '{path}' cannot be written: permission denied")


def write(flag: str, path: Path, data: bytes) -> None:
    """Write what `flag` asked for. Raises ConfigError when the file cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{flag}: '{path}' cannot be written: {error.strerror or error}") from None


def write_page(path: Path, text: str) -> None:
    """Write what `--html` asked for. Raises ConfigError when the file cannot be written."""
    write("--html", path, text.encode())
