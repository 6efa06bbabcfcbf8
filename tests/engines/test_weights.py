"""The weights version: equal for equal bytes anywhere, different for any changed byte, remembered safely."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tiercel.engines import weights
from tiercel.engines.weights import weights_revision
from tiercel.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(weights, "_PART_BYTES", 1000)
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "one.safetensors").write_bytes(os.urandom(2500))
    (made / "two.safetensors").write_bytes(os.urandom(1000))
    return made


def test_a_copy_elsewhere_has_the_same_version(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("not part of it")
    assert weights_revision(copy) == weights_revision(folder)


def test_names_that_are_not_text_in_any_encoding(folder: Path, tmp_path: Path) -> None:
    same = weights_revision(folder)
    odd = folder.rename(tmp_path / os.fsdecode(b"model \xff"))
    assert weights_revision(odd, memo_dir=tmp_path / "memo") == same
    assert weights_revision(odd, memo_dir=tmp_path / "memo") == same
    assert len(list((tmp_path / "memo").iterdir())) == 3
    (odd / "one.safetensors").rename(odd / os.fsdecode(b"\xff.safetensors"))
    assert weights_revision(odd) != same
    assert weights.readable(odd).encode().endswith(b"model \\xff")


@pytest.mark.parametrize("at", [0, 999, 1000, 2499])
def test_one_changed_bit_anywhere_changes_it(folder: Path, at: int) -> None:
    before = weights_revision(folder)
    path = folder / "one.safetensors"
    changed = bytearray(path.read_bytes())
    changed[at] ^= 1
    path.write_bytes(changed)
    assert weights_revision(folder) != before


def test_config_names_and_split_count(folder: Path) -> None:
    seen = {weights_revision(folder)}
    (folder / "config.json").write_text('{"rope": 2}')
    seen.add(weights_revision(folder))
    (folder / "two.safetensors").rename(folder / "three.safetensors")
    seen.add(weights_revision(folder))
    whole = (folder / "one.safetensors").read_bytes()
    (folder / "one.safetensors").write_bytes(whole[:-1])
    (folder / "three.safetensors").write_bytes(whole[-1:] + (folder / "three.safetensors").read_bytes())
    seen.add(weights_revision(folder))
    assert len(seen) == 4


def test_unchanged_files_are_not_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = weights_revision(folder, tmp_path / "memo")
    monkeypatch.setattr(weights, "_tree_digest", lambda path, size: pytest.fail(f"read {path} again"))
    assert weights_revision(folder, tmp_path / "memo") == first


def test_a_file_replaced_with_the_same_size_and_time_is_noticed(folder: Path, tmp_path: Path) -> None:
    path = folder / "one.safetensors"
    before, times = weights_revision(folder, tmp_path / "memo"), path.stat()
    other = tmp_path / "other"
    other.write_bytes(os.urandom(2500))
    os.replace(other, path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_revision(folder, tmp_path / "memo") != before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"path": 1}', b"\x80\x04K\x01."])
def test_a_damaged_note_is_ignored(folder: Path, tmp_path: Path, content: bytes) -> None:
    first = weights_revision(folder, tmp_path / "memo")
    notes = list((tmp_path / "memo").iterdir())
    assert len(notes) == 3
    for note in notes:
        note.write_bytes(content)
    assert weights_revision(folder, tmp_path / "memo") == first


def test_a_memo_folder_that_cannot_be_written_costs_nothing_else(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "memo").write_text("a file in its place")
    assert weights_revision(folder, tmp_path / "memo") == weights_revision(folder)


def test_no_weights_is_one_clear_line(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelError, match=r"holds no weights; accepted are \.safetensors"):
        weights_revision(folder)
