"""Reports as files: JSON read back with its format checked, pages written. Knows not what is in them."""

from __future__ import annotations

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


def write_page(path: Path, text: str) -> None:
    """Write what `--html` asked for. Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: '{path}' cannot be written: {error.strerror or error}") from None
