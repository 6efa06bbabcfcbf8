"""Where Tiercel keeps what it can make again: the cache directory.

It never falls back to a directory nobody named: `/.cache`, a temporary directory or the working directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tiercel.errors import ConfigError

CACHE_DIR_VARIABLE = "TIERCEL_CACHE_DIR"


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `$TIERCEL_CACHE_DIR`, else `$HOME/.cache/tiercel`. Raises ConfigError when neither is set.

    Only `HOME` is asked, not the password file: a service account's home there is often `/` or absent.
    """
    if explicit := environ.get(CACHE_DIR_VARIABLE):
        try:
            return Path(explicit).expanduser().absolute()
        except RuntimeError:
            raise ConfigError(
                f"{CACHE_DIR_VARIABLE} is '{explicit}', which names a home directory that is not known; "
                "give a full path"
            ) from None
    home = environ.get("HOME")
    if not home or not os.path.isabs(home):
        raise ConfigError(
            f"no cache directory: HOME is {'not set' if not home else repr(home)}; "
            f"set {CACHE_DIR_VARIABLE} to a directory you can write to"
        )
    return Path(home) / ".cache" / "tiercel"


def default_socket(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the socket of the host's daemon where none is named: in the runtime or the cache directory."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        return Path(runtime) / "tiercel" / "daemon.sock"
    return cache_dir(environ) / "daemon.sock"


def writable_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cache directory, created if need be. Raises ConfigError if it cannot be written to."""
    folder = cache_dir(environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        named = CACHE_DIR_VARIABLE if environ.get(CACHE_DIR_VARIABLE) else "HOME"
        raise ConfigError(
            f"cache directory {folder} (from {named}) cannot be written to: {reason}; "
            f"set {CACHE_DIR_VARIABLE} to a directory you can write to"
        )
    return folder
