"""Who may do what: the socket's directory, the tiers' directories, the files of keys; and room on disks.

Only looks: makes no directory, opens no socket, shows no key.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from tiercel.config import TierConfig, human_bytes
from tiercel.config.schema import GIB
from tiercel.doctor.finding import Finding, fail, ok, skip, warn
from tiercel.errors import TierError
from tiercel.service.spawn import SOCKET_PATH_BYTES_MAX
from tiercel.tiers import FilesTier

_OTHERS_WRITE = stat.S_IWOTH
# The store leaves the last percent of a disk, at most 1 GiB, to others.
_SPARE_SHARE, _SPARE_BYTES_MAX = 0.01, GIB
_COUNTING_S = 1.0
_COUNTED_AT_ONCE = 256


def socket_place(path: Path) -> Finding:
    """Whether a daemon can put its socket there, and nobody else his."""
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        said = f"socket path of {length} bytes: {path}"
        return fail(
            said, f"name one of up to {SOCKET_PATH_BYTES_MAX} bytes with daemon.socket", length, "bytes"
        )
    if os.path.lexists(path) and not path.is_socket():
        return fail(f"{path} is there and is no socket", "name another with daemon.socket")
    return _directory(path.parent, "sockets of other users could stand there")


def tier_directory(tier: TierConfig) -> Finding:
    """Whether a tier's directory can be made, read and written by this user alone."""
    assert tier.path is not None
    if tier.path.exists() and not tier.path.is_dir():
        return fail(f"{tier.path} is not a directory", "name a directory of its own for the tier")
    return _directory(tier.path, "others could plant files there")


def key_file(source: str) -> Finding | None:
    """Whether a file of keys is this user's alone; None where keys come from elsewhere."""
    scheme, _, place = source.partition(":")
    if scheme != "file":
        return None
    path = Path(place).expanduser()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as fault:
        return fail(f"{path}: {fault.strerror}", "encrypt = file:PATH names a file that this user can read")
    if not os.access(path, os.R_OK):
        return fail(f"{path} cannot be read by user {os.geteuid()}", f"chown {os.geteuid()} {path}")
    if mode & (stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH):
        return warn(f"{path} has mode {mode:04o}", f"chmod 600 {path}: others can read the keys")
    return ok(f"{path} has mode {mode:04o}")


def held_bytes(path: Path) -> int | None:
    """What records in a directory take, counted for a moment; None where that was not enough."""
    try:
        tier = FilesTier(path, create=False)
    except TierError:
        return 0  # no cache there yet
    until_s = time.monotonic() + _COUNTING_S
    held = 0
    for number, one in enumerate(tier.scan()):
        held += one.record_bytes
        if number % _COUNTED_AT_ONCE == 0 and time.monotonic() > until_s:
            return None
    return held


def room(tier: TierConfig, held: int | None) -> Finding:
    """Whether the disk has room for what the tier may hold; `held` bytes lie there already, if known."""
    assert tier.path is not None
    assert tier.size_bytes is not None
    seen = os.statvfs(standing(tier.path))
    free, total = seen.f_bavail * seen.f_frsize, seen.f_blocks * seen.f_frsize
    spare = min(int(total * _SPARE_SHARE), _SPARE_BYTES_MAX)
    said = f"{human_bytes(free)} free of {human_bytes(total)}; size is {human_bytes(tier.size_bytes)}"
    if held:
        said += f", {human_bytes(held)} of it there"
    if free < spare:
        advice = f"make room: nothing is written while fewer than {human_bytes(spare)} are left"
        return fail(said, advice, free, "bytes")
    if tier.size_bytes - (held or 0) <= free - spare:
        return ok(said, free, "bytes")
    if held is None and tier.size_bytes <= total - spare:
        return skip(f"{said}; what lies there is too much to count now", "tiercel cache ls counts it")
    most = human_bytes(max(0, free - spare + (held or 0)))
    return warn(said, f"the disk fills before the cap is reached: set size to {most} or less", free, "bytes")


def standing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that is there."""
    for one in (path, *path.absolute().parents):
        if os.path.lexists(one):
            return one
    return Path("/")


def _directory(path: Path, danger: str) -> Finding:
    there = standing(path)
    missing = "" if there == path else f"{path} will be made in "
    me = os.geteuid()
    try:
        seen = there.stat()
    except OSError as fault:
        return fail(f"{there}: {fault.strerror}", "mend the path")
    mode = stat.S_IMODE(seen.st_mode)
    said = f"{missing}{there}, mode {mode:04o}, user {seen.st_uid}"
    if not there.is_dir():
        return fail(f"{there} is not a directory", "name another path")
    if _read_only(there):
        return fail(f"{said}: a read-only file system", "mount it read-write, or name another directory")
    if not os.access(there, os.W_OK | os.X_OK):
        return fail(f"{said}: not writable for user {me}", f"chown {me} {there}, or name another directory")
    if not missing and mode & _OTHERS_WRITE:
        return warn(f"{said}: anybody may write", f"chmod o-w {there}: {danger}")
    return ok(said)


def _read_only(directory: Path) -> bool:
    try:
        return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)
    except OSError:
        return False
