"""The weights version: a digest of every byte that makes a model answer as it does.

    revision = blake2b-256 over, in name order, (name, size, tree digest) of config.json and all weight files
    tree digest of a file = blake2b-256 over the blake2b-256 digests of its 64 MiB parts

A digest of headers and samples would miss a fine-tune that changed one layer, so all bytes are read, in
parallel (about 1 GB/s per core). Because that takes a while for large models, a file's digest is remembered
under (path, device, inode, size, mtime_ns, ctime_ns): a changed file cannot keep all of these. Nothing here
loads a weight or trusts what is remembered beyond that test.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import msgspec

from tiercel.config.paths import cache_dir
from tiercel.errors import ConfigError, EngineError, ModelError

WEIGHT_SUFFIXES = (".safetensors",)
# What engines load beside that.
ENGINE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIG_FILE = "config.json"
_PART_BYTES = 64 << 20
_THREADS_MAX = 8
_DIGEST_BYTES = 32
# A terabyte of weights is read in less.
_TURN_S = 1800.0


class _Remembered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was hashed, exactly, and what came out."""

    path: str
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    digest: str


def weights_revision(
    folder: Path, memo_dir: Path | None = None, suffixes: tuple[str, ...] = WEIGHT_SUFFIXES
) -> str:
    """Return the weights version of the model in `folder` as 64 hex digits.

    Blocks while it reads files whose digest is not remembered in `memo_dir` (None: remember nothing).
    Raises ModelError when there are no weight files or one cannot be read.
    """
    files = sorted(path for path in _files(folder) if path.suffix in suffixes)
    if not files:
        raise ModelError(f"model folder {folder} holds no weights; accepted are {', '.join(suffixes)}")
    combined = blake2b(digest_size=_DIGEST_BYTES, person=b"tiercel-weights")
    for path in [folder / _CONFIG_FILE, *files]:
        try:
            size_bytes, digest = _file_digest(path, memo_dir)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
        named = os.fsencode(path.name)
        combined.update(len(named).to_bytes(4, "little") + named + size_bytes.to_bytes(8, "little") + digest)
    return combined.hexdigest()


def model_revision(model: str, revision: str | None, load_format: object) -> str:
    """Return the weights version of the model an engine was told to load: a folder, a file or a name.

    Reads its weight files unless their digests are remembered. Raises ModelError or EngineError when they
    cannot be found on this host.
    """
    if str(getattr(load_format, "value", load_format)) == "dummy":
        return "dummy"  # engines make them from a fixed seed
    try:
        memo = cache_dir(os.environ) / "weights"
    except ConfigError:
        memo = None
    path = Path(model)
    with _in_turn(memo):
        if path.is_file():  # a GGUF file
            return weights_revision(path.parent, memo, (path.suffix,))
        return weights_revision(path if path.is_dir() else hub_folder(model, revision), memo, ENGINE_SUFFIXES)


def adapter_digest(folder: Path) -> bytes | None:
    """32 bytes over the names and contents of an adapter's files; None when there is nothing to read."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if not files:
            return None
        whole = blake2b(digest_size=32, person=b"tiercel-adapter")
        for path in files:
            one = blake2b(digest_size=32)
            with path.open("rb", buffering=0) as file:
                while data := file.read(1 << 20):
                    one.update(data)
            name = path.name.encode("utf-8", "surrogateescape")
            whole.update(len(name).to_bytes(4, "little") + name + one.digest())
    except OSError:
        return None
    return whole.digest()


def readable(path: Path) -> str:
    """`path` as text that any encoder takes: bytes that are not UTF-8 are spelt out."""
    return os.fsencode(path).decode(errors="backslashreplace")


@contextlib.contextmanager
def _in_turn(memo_dir: Path | None) -> Iterator[None]:
    """Let one process at a time read weights: the others of an engine then find what it has remembered."""
    fd = None if memo_dir is None else _lock_file(memo_dir)
    if fd is None:  # nothing is remembered: no sense in waiting
        yield
        return
    try:
        until_s = time.monotonic() + _TURN_S
        while not _locked(fd) and time.monotonic() < until_s:
            time.sleep(0.1)
        yield
    finally:
        os.close(fd)


def _lock_file(memo_dir: Path) -> int | None:
    try:
        memo_dir.mkdir(parents=True, exist_ok=True)
        return os.open(memo_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _locked(fd: int) -> bool:
    """Whether it is our turn; where there are no locks to be had, it always is."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def hub_folder(model: str, revision: str | None) -> Path:
    """Where the Hugging Face cache of this host has a model or an adapter. Raises EngineError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        raise EngineError(
            f"the weight files of {model!r} are not found on this host; "
            "accepted are a model folder and a model in the Hugging Face cache"
        ) from None


def _files(folder: Path) -> Iterable[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        raise ModelError(f"cannot read model folder {folder}: {error.strerror or error}") from None


def _file_digest(path: Path, memo_dir: Path | None) -> tuple[int, bytes]:
    """Size and tree digest of a file, from `memo_dir` if it was hashed before and has not changed since."""
    real = path.resolve()
    status = real.stat()
    known = _Remembered(
        path=readable(real),
        device=status.st_dev,
        inode=status.st_ino,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        digest="",
    )
    memo = None
    if memo_dir is not None:
        memo = memo_dir / f"{blake2b(os.fsencode(real), digest_size=16).hexdigest()}.json"
        if (digest := _recall(memo, known)) is not None:
            return status.st_size, digest
    digest = _tree_digest(real, status.st_size)
    if memo is not None:
        _remember(memo, msgspec.structs.replace(known, digest=digest.hex()))
    return status.st_size, digest


def _tree_digest(path: Path, size_bytes: int) -> bytes:
    offsets = range(0, max(size_bytes, 1), _PART_BYTES)
    with ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1)) as pool:
        parts = list(pool.map(lambda offset: _part_digest(path, offset), offsets))
    return blake2b(b"".join(parts), digest_size=_DIGEST_BYTES, person=b"tiercel-file").digest()


def _part_digest(path: Path, offset: int) -> bytes:
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        left = _PART_BYTES
        while left and (data := file.read(min(left, 1 << 20))):
            hashed.update(data)
            left -= len(data)
    return hashed.digest()


def _recall(memo: Path, known: _Remembered) -> bytes | None:
    try:
        found = msgspec.json.decode(memo.read_bytes(), type=_Remembered)
        digest = bytes.fromhex(found.digest)
    except (OSError, ValueError):  # absent, torn or foreign: hash again
        return None
    if msgspec.structs.replace(found, digest="") != known or len(digest) != _DIGEST_BYTES:
        return None
    return digest


def _remember(memo: Path, found: _Remembered) -> None:
    # A note that cannot be written costs the next start some seconds, nothing else.
    with contextlib.suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        temp = memo.with_suffix(f".{os.getpid()}.tmp")
        temp.write_bytes(msgspec.json.encode(found))
        temp.replace(memo)
