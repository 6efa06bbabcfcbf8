"""The cache directory: the one named, or an error that names the variable (row D52)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tiercel.config import cache_dir, writable_cache_dir
from tiercel.errors import ConfigError

ROOT = os.geteuid() == 0


def test_the_directory_named_is_used_even_without_a_home(tmp_path: Path) -> None:
    assert writable_cache_dir({"TIERCEL_CACHE_DIR": str(tmp_path / "a" / "b")}) == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


def test_without_one_named_it_lies_below_home(tmp_path: Path) -> None:
    assert cache_dir({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "tiercel"
    assert cache_dir({"HOME": str(tmp_path), "TIERCEL_CACHE_DIR": ""}) == tmp_path / ".cache" / "tiercel"


def test_a_home_directory_nobody_knows_is_one_line() -> None:
    for refused in (cache_dir, writable_cache_dir):
        with pytest.raises(ConfigError, match="home directory that is not known"):
            refused({"TIERCEL_CACHE_DIR": "~nobody-of-this-name/cache"})


@pytest.mark.parametrize("environ", [{}, {"HOME": ""}, {"HOME": "relative"}])
def test_d52_without_a_home_the_error_names_the_variable(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="set TIERCEL_CACHE_DIR to a directory you can write to"):
        cache_dir(environ)


@pytest.mark.parametrize("variable", ["HOME", "TIERCEL_CACHE_DIR"])
def test_d52_a_directory_that_cannot_be_made_is_refused(tmp_path: Path, variable: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=f"from {variable}.*set TIERCEL_CACHE_DIR"):
        writable_cache_dir({variable: str(tmp_path / "file")})


@pytest.fixture
def within_reach() -> Iterator[Path]:
    """A directory that others may pass; each run of pytest that begins closes those above `tmp_path`."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.mark.skipif(not ROOT, reason="only root can become another user")
@pytest.mark.parametrize("explicit", [False, True])
def test_d52_a_stranger_without_a_home_gets_one_line_or_the_directory_named(
    within_reach: Path, explicit: bool
) -> None:
    own = within_reach / "own"
    own.mkdir()
    os.chown(own, 12345, 12345)
    # Imported first and demoted then: the interpreter itself may be out of a stranger's reach.
    script = (
        "import os\nfrom tiercel.config import writable_cache_dir\nfrom tiercel.errors import ConfigError\n"
        "os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "try: print(writable_cache_dir())\nexcept ConfigError as e: print('refused', e)"
    )
    environ = {"TIERCEL_CACHE_DIR": str(own)} if explicit else {"HOME": "/"}
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    if explicit:
        assert done.stdout.strip() == str(own)
    else:
        assert done.stdout.startswith(
            "refused cache directory /.cache/tiercel (from HOME) cannot be written to: Permission denied"
        )
