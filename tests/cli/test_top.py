"""`tiercel top`: its figures are the store's, it fits any terminal, and outlives the daemon it looks at."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.service.running import Running, environ, tiercel
from tests.store.support import branch, put

from tiercel.cli import run, top_view
from tiercel.config import human_bytes
from tiercel.store import Store, overview_json
from tiercel.store.policy import Decision


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d") / "s"


def served(store: Store) -> None:
    """Some traffic: prompts that share a beginning, found again, and what an engine says of them."""
    for seed in (1, 2):
        put(store, branch(3, 2, seed))  # type: ignore[arg-type]
    store.lookup(branch(3, 2, 1))
    with store.acquire(branch(3, 2, 1)) as lease:
        for _ in lease:
            pass
    reused = Decision(
        prompt_tokens=1000, block_tokens=4, reason="3 blocks found", reused_tokens={"ram": 600},
        computed_tokens=400, action="load", ttft_s=0.25, saved_s=90.0, spent_s=0.01, engine="test", done=True,
    )  # fmt: skip
    cold = Decision(
        prompt_tokens=500, block_tokens=4, reason="nothing", computed_tokens=500, ttft_s=2.0, done=True
    )
    for one in (reused, cold):
        store.report(one)


def eventually(look: Any, wait_s: float = 20.0) -> Any:
    until_s = time.monotonic() + wait_s
    while not (found := look()):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a daemon tells after some traffic, as `tiercel top --json` prints it; compared with its stats."""
    folder = tmp_path_factory.mktemp("d")
    served_at = ("--http", "127.0.0.1:0")
    with Running(folder / "s", disk=folder / "kv", args=served_at) as daemon, daemon.connect() as store:
        assert daemon.process.stdout is not None
        url = daemon.process.stdout.readline().decode().split()[-1].rstrip("/")
        served(store)
        eventually(lambda: store.stats().requests.requests == 2 and store.stats().tiers[0].blocks == 7)
        done = tiercel("top", "--socket", str(folder / "s"), "--json")
        assert done.returncode == 0, done.stderr
        printed = json.loads(done.stdout)
        plain = tiercel("top", "--socket", str(folder / "s"), "--once")
        over_http = tiercel("top", "--url", url, "--json")
        seen = json.loads(json.dumps(overview_json(store.overview(64))))
        assert printed["stats"]["requests"] == seen["stats"]["requests"]
        assert printed["stats"]["counters"] == seen["stats"]["counters"]
        assert printed["stats"]["tiers"] == seen["stats"]["tiers"]
        assert printed["source"]["pid"] == daemon.process.pid
    assert plain.returncode == 0, plain.stderr
    assert over_http.returncode == 0, over_http.stderr
    return {**printed, "plain": plain.stdout, "over_http": json.loads(over_http.stdout), "url": url}


def test_its_figures_are_the_stores(told: dict[str, Any]) -> None:
    stats, text = told["stats"], told["plain"]
    disk = stats["tiers"][0]
    assert (stats["ram_blocks"], disk["blocks"]) == (7, 7)
    assert f"{stats['requests']['requests']} requests  40.0% of 1,500 prompt tokens reused" in text
    assert "1m 30s saved" in text
    assert "TTFT 250 ms reused" in text
    assert "TTFT 2.00 s computed" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    held = f"{human_bytes(disk['used_bytes'])} / {human_bytes(disk['cap_bytes'])}"
    assert held in rows["disk"]
    assert re.search(r" 7 +[\d.]+ k?B +[\d.]+ k?B", rows["disk"])
    assert human_bytes(stats["ram_blocks"] * stats["slot_bytes"]) in rows["ram"]
    assert "3 blocks from 0" in text
    assert "model-a: " in text
    assert "3 blocks found" in text


def test_without_a_terminal_it_prints_one_picture(told: dict[str, Any]) -> None:
    # `told` was printed into a pipe.
    assert "\x1b" not in told["plain"]
    assert told["plain"].count("tiercel top") == 1


@settings(max_examples=60)
@given(width=st.integers(20, 240), height=st.integers(5, 80))
def test_it_fits(told: dict[str, Any], width: int, height: int) -> None:
    shown = top_view.lines(told, told, width, height)
    assert len(shown) <= height
    assert all(cell_len(line.plain) <= width for line in shown)
    if height >= 8:
        assert any(line.plain.startswith("disk") for line in shown)


def test_at_80_by_24_everything_has_its_place(told: dict[str, Any]) -> None:
    text = "\n".join(line.plain for line in top_view.lines(told, None, 80, 24))
    for part in ("saved", "ram ", "disk ", "latest requests", "prefixes, as prompts share them", "scopes"):
        assert part in text


def test_rates_are_what_was_moved_since_the_last_look(told: dict[str, Any]) -> None:
    later = json.loads(json.dumps(told))
    later["at_s"] = told["at_s"] + 2.0
    later["stats"]["tiers"][0]["counters"]["read_bytes"] += 8_000_000
    row = next(line.plain for line in top_view.lines(later, told, 80) if line.plain.startswith("disk"))
    assert "4.0 MB/s" in row
    assert "0 B/s" in row
    # A store that began anew has no rate yet.
    anew = json.loads(json.dumps(later))
    anew["stats"]["tiers"][0]["counters"]["read_bytes"] = 1
    row = next(line.plain for line in top_view.lines(anew, later, 80) if line.plain.startswith("disk"))
    assert " 1 B " in row


def test_an_open_breaker_stands_where_the_bar_was(told: dict[str, Any]) -> None:
    later = json.loads(json.dumps(told))
    later["stats"]["tiers"][0]["breaker"] = "open"
    assert not any("breaker open" in line.plain for line in top_view.lines(told, None, 80))
    assert any("breaker open" in line.plain for line in top_view.lines(later, None, 80))


def test_names_of_others_cannot_steer_the_terminal(told: dict[str, Any]) -> None:
    later = json.loads(json.dumps(told))
    later["scopes"][0]["model"] = "\x1b[2Jevil\n[bold]"
    later["decisions"][0]["reason"] = "a\x07b\nc"
    text = "\n".join(line.plain for line in top_view.lines(later, None, 200))
    assert "\x1b" not in text
    assert "?[2Jevil?[bold]" in text


def test_without_an_engine_there_is_nothing_yet(path: Path) -> None:
    with Running(path):
        done = tiercel("top", "--socket", str(path), "--once")
    assert done.returncode == 0
    assert "no engine has opened the store yet" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--socket", "/nonexistent/s"], "cannot be reached"),
        (["--url", "http://127.0.0.1:9"], "cannot be asked"),
        (["--url", "nonsense"], "is no URL"),
        (["--url", "http://127.0.0.1:9", "--socket", "s"], "give one of them"),
        (["--every", "1"], "has no unit"),
        (["--every", "0s"], "accepted: from 100ms"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], said: str) -> None:
    assert run(["top", "--once", *args]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert said in complaint


def test_over_http_it_shows_the_same(told: dict[str, Any]) -> None:
    over, url = told["over_http"], told["url"]
    assert over["stats"] == told["stats"]
    assert over["scopes"] == told["scopes"]
    assert (over["source"]["up"], over["source"]["where"]) == (True, url)
    shown = [line.plain for line in top_view.lines(over, None, 160)]
    assert shown[0].startswith(f"tiercel top  server {url}")
    assert shown[1:4] == told["plain"].splitlines()[1:4]


# In a terminal.


class Terminal:
    """A command in a terminal of its own; `text` is all it has written there, without colours."""

    def __init__(self, *args: str, size: tuple[int, int] = (24, 80)) -> None:
        self.master, slave = pty.openpty()
        self.resize(size)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tiercel", *args], stdin=slave, stdout=slave, stderr=slave,
            env=environ({"TERM": "xterm-256color"}), start_new_session=True, preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(slave)
        self.raw = b""

    def resize(self, size: tuple[int, int]) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    def until(self, wanted: str, wait_s: float = 30.0) -> str:
        """Read on until this is shown; returns what was read since the call."""
        until_s, seen = time.monotonic() + wait_s, b""
        while wanted not in (text := plain(seen)):
            assert time.monotonic() < until_s, text
            if select.select([self.master], [], [], 0.1)[0]:
                seen += os.read(self.master, 65536)
        return text

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())

    def end(self) -> int:
        until_s = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < until_s:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.raw += os.read(self.master, 65536)
                except OSError:
                    break
        return self.process.wait(30)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


def _own_terminal() -> None:
    # So that its Ctrl-C is ours.
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def plain(raw: bytes) -> str:
    raw = raw.replace(b"\x1b[H", b"\n")
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw.decode("utf-8", "ignore"))


@pytest.fixture
def watched(path: Path, tmp_path: Path) -> Iterator[tuple[Running, Terminal]]:
    with (
        Running(path, disk=tmp_path / "kv") as daemon,
        Terminal("top", "--socket", str(path), "--every", "100ms") as terminal,
    ):
        yield daemon, terminal


def test_in_a_terminal_it_follows_outlives_the_daemon_and_ends_on_q(
    watched: tuple[Running, Terminal], path: Path, tmp_path: Path
) -> None:
    daemon, terminal = watched
    terminal.until("no engine has opened the store yet")
    with daemon.connect() as store:
        served(store)
        shown = terminal.until("2 requests")
        # Drawn for 80 columns, and again for more once there are more.
        assert max(cell_len(line) for line in shown.splitlines()) <= 80
        terminal.resize((40, 130))
        assert max(cell_len(line) for line in terminal.until("3 blocks found").splitlines()) <= 130
    daemon.kill()
    assert "2 requests" in terminal.until("away", 40)
    with Running(path, disk=tmp_path / "kv") as again:
        terminal.until("no engine has opened the store yet")
        assert again.process.poll() is None
        terminal.press("q")
        assert terminal.end() == 0


def test_ctrl_c_ends_it_and_gives_the_terminal_back(watched: tuple[Running, Terminal]) -> None:
    _, terminal = watched
    terminal.until("no engine")
    before = termios.tcgetattr(terminal.master)[3]
    terminal.press("\x03")
    assert terminal.end() == 130
    assert termios.tcgetattr(terminal.master)[3] & termios.ICANON
    assert not before & termios.ICANON
    # The screen from before is back.
    assert b"\x1b[?1049l" in terminal.raw
