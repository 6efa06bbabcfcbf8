"""The keys of an encrypted tier: read once from a file, a variable or a command, and one derived per tenant.

A source holds one key of 32 bytes (as they are, in hex or in base64), or several, one `id:key` per line. The
first encrypts; all decrypt. No error, `repr` or record shows a key; a record names its key by id and
fingerprint, so that a key of the same id and other bytes is another key.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tiercel.errors import TierError

MASTER_KEY_BYTES = 32
_ACCEPTED = "file:PATH, env:NAME or command:PROGRAM ARGUMENTS"
_KEYS_ACCEPTED = "one key of 32 bytes (raw, 64 hex digits or base64), or lines of ID:KEY with different IDs"
_ID = re.compile(r"[A-Za-z0-9._-]{1,32}", re.ASCII)
_COMMAND_DEADLINE_S = 30.0
_SOURCE_BYTES_MAX = 64 << 10
_TENANTS_MAX = 1024
_STDERR_CHARS_MAX = 160


class KeyRing:
    """Master keys by the name that records give them; the first is the one to encrypt with."""

    def __init__(self, keys: Sequence[tuple[str, bytes]]) -> None:
        """`keys`: at least one of (id, 32 bytes)."""
        self._masters = {f"{name}:{_fingerprint(master)}": master for name, master in keys}
        self.first = next(iter(self._masters))
        self.derive = lru_cache(_TENANTS_MAX)(self._derive)

    def __len__(self) -> int:
        return len(self._masters)

    @classmethod
    def load(cls, source: str) -> KeyRing:
        """Read the keys that `source` names. Blocks for as long as a command takes, 30 s at most.

        Raises `TierError`, one line that names the source and never shows what it holds.
        """
        scheme, colon, place = source.partition(":")
        readers = {"file": _from_file, "env": _from_env, "command": _from_command}
        if not colon or not place.strip() or scheme not in readers:
            # What was given instead may be a key.
            raise TierError(f"encrypt is no source of keys; accepted: {_ACCEPTED}")
        keys = _parse(readers[scheme](place))
        if keys is None:
            named = place.split()[0] if scheme == "command" else place
            raise TierError(f"encrypt = '{scheme}:{named}' does not hold keys; accepted: {_KEYS_ACCEPTED}")
        return cls(keys)

    def _derive(self, key_id: str, tag: bytes) -> bytes | None:
        """The 32-byte key of the tenant (scope) with this tag; None where the ring lacks the master key."""
        master = self._masters.get(key_id)
        return None if master is None else _hkdf(master, b"tiercel record" + tag, MASTER_KEY_BYTES)


def _hkdf(master: bytes, info: bytes, length: int) -> bytes:
    """HKDF with SHA-256 (RFC 5869), no salt."""
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(master)


def _fingerprint(master: bytes) -> str:
    return _hkdf(master, b"tiercel fingerprint", 4).hex()


def _from_file(place: str) -> bytes:
    try:
        with Path(place).expanduser().open("rb") as file:
            return file.read(_SOURCE_BYTES_MAX)
    except (OSError, RuntimeError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else fault
        raise TierError(f"encrypt = 'file:{place}' cannot be read: {why}; accepted: {_ACCEPTED}") from None


def _from_env(place: str) -> bytes:
    value = os.environ.get(place)
    if value is None:
        raise TierError(f"encrypt = 'env:{place}': the variable is not set; accepted: {_ACCEPTED}")
    return value.encode()


def _from_command(place: str) -> bytes:
    # Arguments may be secrets of their own: only the program is named.
    shown = f"encrypt = 'command:{place.split()[0]} ...'"
    try:
        done = subprocess.run(
            shlex.split(place),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_DEADLINE_S,
            check=False,
        )
    except OSError as fault:
        raise TierError(f"{shown} cannot be run: {fault.strerror}") from None
    except ValueError as fault:
        raise TierError(f"{shown} is no command line: {fault}") from None
    except subprocess.TimeoutExpired:
        raise TierError(f"{shown} gave no answer within {_COMMAND_DEADLINE_S:.0f} s") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[:_STDERR_CHARS_MAX]
        raise TierError(f"{shown} ended with status {done.returncode}: {said or 'no message'}")
    return done.stdout[:_SOURCE_BYTES_MAX]


def _parse(held: bytes) -> list[tuple[str, bytes]] | None:
    if len(held) == MASTER_KEY_BYTES:
        return [("key", held)]
    try:
        lines = [line.strip() for line in held.decode("ascii").splitlines() if line.strip()]
    except UnicodeDecodeError:
        return None
    keys: list[tuple[str, bytes]] = []
    for line in lines:
        name, _, text = line.partition(":") if ":" in line else ("key", ":", line)
        key = _decoded(text.strip().encode())
        if key is None or not _ID.fullmatch(name.strip()) or name.strip() in dict(keys):
            return None
        keys.append((name.strip(), key))
    return keys or None


def _decoded(text: bytes) -> bytes | None:
    """32 bytes from hex or base64, or None."""
    try:
        if len(text) == 2 * MASTER_KEY_BYTES:
            return bytes.fromhex(text.decode("ascii"))
        key = base64.b64decode(text.replace(b"-", b"+").replace(b"_", b"/"), validate=True)
    except ValueError:
        return None
    return key if len(key) == MASTER_KEY_BYTES else None
