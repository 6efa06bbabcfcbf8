"""The token that whoever changes something must show: from a file or made here, compared in constant time."""

from __future__ import annotations

import hmac
import re
import secrets
from pathlib import Path

from tiercel.errors import ConfigError

_CHARS_MIN, _FILE_BYTES_MAX = 16, 4096
_ACCEPTED = re.compile(rf"[!-~]{{{_CHARS_MIN},}}")


def make_token() -> str:
    """A new token, of 192 random bits."""
    return secrets.token_urlsafe(24)


def read_token(path: Path) -> str:
    """The token in a file, without the line break at its end. Raises ConfigError, which never quotes it."""
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
    except OSError as fault:
        raise ConfigError(f"--token-file {path}: {fault.strerror}") from None
    told = raw.decode("ascii", "replace").strip()
    if len(raw) > _FILE_BYTES_MAX or not _ACCEPTED.fullmatch(told):
        raise ConfigError(
            f"--token-file {path}: holds no token; accepted: {_CHARS_MIN} or more visible ASCII characters "
            "in one line"
        )
    return told


def same(authorization: bytes, token: str) -> bool:
    """Whether a request's Authorization header carries the token."""
    return hmac.compare_digest(authorization, f"Bearer {token}".encode())
