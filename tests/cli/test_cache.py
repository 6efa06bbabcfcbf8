"""`tiercel cache` as a person meets it: what it prints, asks, refuses and deletes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiercel.cli import run
from tiercel.testing.records import RECORD_BYTES, chain, records
from tiercel.tiers import FilesTier

CHAINS = [chain(8), chain(4, salt="s3cret"), chain(2, model="org/other-model")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tier = FilesTier(tmp_path / "cache")
    for one in CHAINS:
        tier.write(*records(one))
    return tmp_path / "cache"


def blocks(root: Path) -> list[int]:
    return [sum(FilesTier(root).contains(list(one.keys))) for one in CHAINS]


def output(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    assert run(["cache", *map(str, args)]) == code
    return capsys.readouterr().out


def complaint(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert run(["cache", *map(str, args)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("tiercel: error: ")
    return captured.err


def spoil(root: Path) -> Path:
    path = FilesTier(root).path(CHAINS[0].keys[3])
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    return path


# ls


def test_ls_shows_a_row_per_scope(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "ls", root).splitlines()
    assert lines[0] == f"{root}: 14 blocks in 3 scopes, 168.0 KiB"
    assert lines[1].split() == (
        "MODEL REVISION DTYPE LAYOUT SALT ADAPTER TOKENS BLOCKS SIZE OLDEST NEWEST".split()
    )
    assert lines[2].split()[:4] == ["model", "r1", "bfloat16", "test-1"]
    assert lines[4].startswith("org/other-model")
    assert "s3cret" not in "".join(lines)
    assert len(lines) == 5


def test_one_scope_is_told_as_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output(capsys, "clear", root, "--model", "model", "--yes")
    assert output(capsys, "ls", root).startswith(f"{root}: 2 blocks in 1 scope, ")


def test_ls_json_has_a_row_per_scope(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(output(capsys, "ls", "--json", root))
    assert (shown["blocks"], shown["bytes"]) == (14, 14 * RECORD_BYTES)
    assert [row["blocks"] for row in shown["rows"]] == [8, 4, 2]
    row = shown["rows"][1]
    assert row["scope"] == CHAINS[1].keys[0][:8].hex()
    assert (row["place"], row["model"], row["kv_dtype"], row["block_tokens"]) == (
        str(root), "model", "bfloat16", 4,
    )  # fmt: skip
    assert len(row["salt"]) == 8
    assert "salt" not in shown["rows"][0]
    assert abs(row["newest_use_s"] - time.time()) < 60


def test_ls_of_an_empty_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FilesTier(tmp_path / "cache")
    assert output(capsys, "ls", tmp_path / "cache") == f"{tmp_path / 'cache'}: empty\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="a read-only file system needs root")
def test_ls_works_on_a_read_only_file_system(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = output(capsys, "ls", "--json", root)
    made = subprocess.run(["mount", "--bind", "-o", "ro", root, root], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("cannot mount here")
    try:
        with pytest.raises(OSError, match="Read-only"):
            (root / "x").touch()
        assert output(capsys, "ls", "--json", root) == expected
        assert f"{root}: 14 blocks checked" in output(capsys, "verify", root)
        assert "Read-only file system" in complaint(capsys, "clear", "--all", "--yes", root)
    finally:
        subprocess.run(["umount", root], check=True)
    assert blocks(root) == [8, 4, 2]


def test_a_hostile_name_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FilesTier(tmp_path / "cache").write(*records(chain(1, model="evil\x1b[2J\nname")))
    lines = output(capsys, "ls", tmp_path / "cache").splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("evil?[2J?name")


def test_directories_default_to_the_configured_tiers(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiercel.toml"
    config.write_text(f'[[tiers]]\npath = "{root}"\nsize = "1GiB"\n')
    assert output(capsys, "ls", "--config", config).startswith(f"{root}: 14 blocks")
    flags = ["--set", f"tiers.0.path={root}", "--set", "tiers.0.size=1GiB"]
    assert output(capsys, "ls", *flags).startswith(f"{root}: 14 blocks")
    assert "no cache named: give a directory or a URL" in complaint(capsys, "ls")


def test_a_tier_in_memory_is_one_line_or_passed_over(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = ["--set", "tiers.0.kind=memory", "--set", "tiers.0.size=1GiB"]
    for args in (
        ["ls"],
        ["ls", "memory"],
        ["verify", "0"],
        ["copy", root, "memory"],
        ["ls", "memory://here"],
    ):
        said = complaint(capsys, *args, *memory)
        assert (
            "lies in the process that uses it: there is nothing to look at from outside; accepted: a tier"
            in said
        )
    both = [*memory, "--set", f"tiers.1.path={root}", "--set", "tiers.1.size=1GiB"]
    assert output(capsys, "ls", *both).startswith(f"{root}: 14 blocks")


# verify


def test_verify_of_a_sound_cache(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "verify", root) == f"{root}: 14 blocks checked (168.0 KiB), all sound\n"


def test_verify_says_what_is_bad_deletes_it_and_exits_with_1(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = spoil(root)
    dry = output(capsys, "verify", "--dry-run", root, code=1).splitlines()
    assert dry == [f"{path}: payload checksum differs", f"{root}: 14 blocks checked (168.0 KiB), 1 bad"]
    assert path.exists()
    wet = output(capsys, "verify", root, code=1).splitlines()
    assert wet[0] == f"{path}: payload checksum differs, deleted"
    assert blocks(root) == [7, 4, 2]
    assert output(capsys, "verify", root).endswith("13 blocks checked (156.0 KiB), all sound\n")


def test_verify_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = spoil(root)
    shown = json.loads(output(capsys, "verify", "--json", root, code=1))
    (row,) = shown["rows"]
    assert (root / row["file"], row["deleted"], row["reason"]) == (path, True, "payload checksum differs")
    assert (shown["checked"], shown["bad"]) == (14, 1)


# clear


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--all"], [0, 0, 0]),
        (["--model", "model"], [0, 0, 2]),
        (["--salt", "s3cret"], [8, 0, 2]),
        (["--model", "org/other-model"], [8, 4, 0]),
        (["--model", "org/other-model", "--salt", "s3cret"], [8, 4, 2]),
        (["--salt", "guess"], [8, 4, 2]),
        (["--older-than", "7d"], [7, 4, 2]),
        (["--older-than", "2w"], [8, 4, 2]),
        (["--older-than", "12h", "--model", "org/other-model"], [8, 4, 2]),
    ],
)
def test_clear_deletes_what_meets_every_condition(
    root: Path, capsys: pytest.CaptureFixture[str], flags: list[str], left: list[int]
) -> None:
    os.utime(FilesTier(root).path(CHAINS[0].keys[7]), (time.time() - 8 * 86400,) * 2)
    shown = json.loads(output(capsys, "clear", "--yes", "--json", *flags, root))
    assert blocks(root) == left
    assert shown["deleted_blocks"] == 14 - sum(left)
    assert shown["deleted_bytes"] == shown["deleted_blocks"] * RECORD_BYTES


@pytest.mark.parametrize(
    ("answer", "code", "left"), [("y\n", 0, [0, 0, 0]), ("n\n", 1, [8, 4, 2]), ("", 2, [8, 4, 2])]
)
def test_clear_asks(root: Path, answer: str, code: int, left: list[int]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tiercel", "cache", "clear", "--all", root],
        input=answer, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert f"{root}: 14 blocks in 3 scopes, 168.0 KiB (model, org/other-model)" in done.stderr
    assert "Traceback" not in done.stderr
    assert blocks(root) == left


def test_clear_needs_to_be_told_what(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "clear needs --all, or" in complaint(capsys, "clear", "--yes", root)
    assert "not both" in complaint(capsys, "clear", "--yes", "--all", "--model", "model", root)
    assert "'soon' is not a time" in complaint(capsys, "clear", "--yes", "--older-than", "soon", root)
    assert "'7' is not a time" in complaint(capsys, "clear", "--yes", "--older-than", "7", root)
    assert "would be every block" in complaint(capsys, "clear", "--yes", "--older-than", "0d", root)
    assert blocks(root) == [8, 4, 2]


@pytest.mark.parametrize("action", [["ls"], ["verify"], ["clear", "--all", "--yes"]])
def test_what_is_no_cache_is_refused_and_nothing_of_it_is_lost(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str]
) -> None:
    other = tmp_path / "other"
    record = other / FilesTier(root).path(CHAINS[0].keys[0]).relative_to(root)
    record.parent.mkdir(parents=True)
    record.write_text("mine")
    assert f"{other}: not a Tiercel cache" in complaint(capsys, *action, root, other)
    assert f"{tmp_path / 'none'}: No such file" in complaint(capsys, *action, tmp_path / "none")
    assert "is not a directory" in complaint(capsys, *action, record)
    (other / "FORMAT").write_text("tiercel-files 99\n")
    assert "tiercel-files 99" in complaint(capsys, *action, other)
    assert record.read_text() == "mine"
    assert blocks(root) == [8, 4, 2], "nothing is deleted before all directories are known to be caches"
