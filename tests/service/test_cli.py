"""`tiercel daemon` as people and service managers use it: one line for every mistake, readiness, status."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.service.running import ROOT, Running, environ, tiercel
from tests.store.support import PAYLOAD, chain, eventually, put


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d") / "s"


def refusal(*args: str, code: int = 2) -> str:
    """The one line of a command that must end at once, without a traceback."""
    done = tiercel(*args)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.startswith("tiercel: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("tiercel: error: ").strip()


def test_it_serves_says_so_and_ends_in_order(path: Path) -> None:
    with Running(path) as daemon:
        assert daemon.said == f"serving on {path}  (SIGTERM or Ctrl-C ends it)\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert daemon.status() | {"uptime_s": 0} == {
            "pid": daemon.process.pid, "clients": 1, "uptime_s": 0, "stats": None,
        }  # fmt: skip
        assert daemon.end() == 0
        assert not path.exists()
        assert daemon.log.read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_twice_does_not_cut_the_flush_short(path: Path, tmp_path: Path, number: int) -> None:
    lazily = ("tiers.0.write=on-evict",)
    with Running(path, *lazily, disk=tmp_path / "kv") as daemon, daemon.connect() as store:
        assert put(store, chain(30)) == 30  # type: ignore[arg-type]
        daemon.signal(number)
        daemon.signal(number)
        assert daemon.process.wait(30) == 0
    assert len(list((tmp_path / "kv").rglob("*.kv"))) == 30


def test_status_tells_what_there_is(path: Path, tmp_path: Path) -> None:
    with Running(path, disk=tmp_path / "kv") as daemon, daemon.connect() as store:
        said = tiercel("daemon", "--socket", str(path), "status").stdout
        assert f"daemon {daemon.process.pid} at {path}: up " in said
        assert "2 clients" in said
        put(store, chain(5))  # type: ignore[arg-type]
        assert store.flush()
        assert store.lookup(chain(8)).blocks == 5
        said = tiercel("daemon", "--socket", str(path), "status").stdout
        assert "ram: 5 blocks of 8.0 KiB, 5 of 128 slots in use, 0 leases, 0 pins" in said
        assert "disk: 5 blocks, 40.0 KiB of 100.0 MiB, breaker closed, 0 writes wait" in said
        assert "8 looked up, 5 hit, 5 stored, 0 not stored, 0 loads failed" in said
        stats = daemon.status()["stats"]
        assert (stats["ram_blocks"], stats["leases"], stats["tiers"][0]["blocks"]) == (5, 0, 5)


def test_looking_takes_no_memory(path: Path) -> None:
    """The arena is not handed to those who only look: mapping 64 GiB to print a line would cost seconds."""
    from tiercel.service.connecting import reach

    with Running(path) as daemon, daemon.connect(), reach(path) as store:
        assert store.figures() is not None
        assert store.slab is None


def test_status_of_nothing(path: Path) -> None:
    line = refusal("daemon", "--socket", str(path), "status")
    assert line == (
        f"daemon at '{path}' cannot be reached: No such file or directory; start one there: "
        f"tiercel daemon --socket {path}"
    )


def test_a_stale_socket_is_replaced(path: Path) -> None:
    with Running(path) as first:
        first.kill()
        assert path.is_socket(), "the control: kill -9 leaves it"
        line = refusal("daemon", "--socket", str(path), "status")
        assert "Connection refused" in line
        with Running(path) as second:
            assert second.status()["pid"] == second.process.pid


def test_a_second_daemon_on_a_socket_is_refused_and_the_first_goes_on(path: Path) -> None:
    with Running(path) as first:
        line = refusal("daemon", "--socket", str(path))
        assert line == (
            f"a daemon already serves '{path}'; stop it or name another socket with daemon.socket"
        )
        assert first.status()["pid"] == first.process.pid
        first.signal(signal.SIGSTOP)
        assert "already serves" in refusal("daemon", "--socket", str(path)), "one that hangs is there too"


def test_of_eight_started_at_once_on_a_stale_socket_one_serves(path: Path) -> None:
    with Running(path) as dead:
        dead.kill()
    command = [sys.executable, "-m", "tiercel", "daemon", "--socket", str(path)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ(), text=True)
        for _ in range(8)
    ]
    try:
        assert eventually(lambda: sum(one.poll() is not None for one in started) == 7, 60)
        (serving,) = [one for one in started if one.poll() is None]
        assert f'"pid": {serving.pid}' in tiercel("daemon", "--socket", str(path), "status", "--json").stdout
        assert eventually(lambda: path.is_socket())
        serving.terminate()
        assert serving.wait(30) == 0
    finally:
        for one in started:
            one.kill()
            one.communicate()


def test_a_path_too_long(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    size = len(os.fsencode(long))
    assert refusal("daemon", "--socket", str(long)) == (
        f"socket path '{long}' has {size} bytes; accepted are up to 107: "
        "name a shorter one with daemon.socket"
    )


def test_a_path_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("mine")
    assert refusal("daemon", "--socket", str(path)) == (
        f"'{path}' is there and is no socket; name another with daemon.socket"
    )
    assert path.read_text() == "mine"


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refusal("daemon", "--socket", str(tmp_path / "file" / "s"))
    assert "cannot be served: " in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user() -> None:
    source = (
        "import os, sys; from tiercel.cli import main; import tiercel.cli.daemon, tiercel.service; "
        "os.setgid(65534); os.setuid(65534); main()"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        done = subprocess.run(
            [sys.executable, "-c", source, "daemon", "--socket", f"{folder}/s"],
            capture_output=True, text=True, timeout=60, check=False, cwd="/", env=environ(),
        )  # fmt: skip
    assert done.stderr == f"tiercel: error: socket '{folder}/s' cannot be served: Permission denied\n"
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--sokcet", "/s"), "No such option '--sokcet'"),
        (("--set", "ram.sise=1GiB"), "did you mean 'ram.size'?"),
        (("--set", "ram.size"), "'ram.size' is not KEY=VALUE"),
        (("--set", "ram.size=1"), "ram.size"),
        (("--exit-when-idle", "soon"), "soon"),
        (("--config", "/no/such.toml"), "cannot be read"),
        (("stauts",), "No such command 'stauts'"),
        (("--set", "tiers.0.path=/no/such/tiercel"), "tiers.0.size"),
    ],
)
def test_a_wrong_flag_or_setting(path: Path, args: tuple[str, ...], said: str) -> None:
    assert said in refusal("daemon", "--socket", str(path), *args)
    assert not path.exists()


def test_with_a_slot_size_the_store_opens_at_the_start_or_not_at_all(path: Path, tmp_path: Path) -> None:
    line = refusal("daemon", "--socket", str(path), "--set", "ram.size=900TiB", "--set", "ram.slot=1MiB")
    assert "does not fit" in line
    assert not path.exists(), "nothing is left for the next start to stumble over"
    line = refusal("daemon", "--socket", str(path), "--set", "ram.size=2MiB", "--set", "ram.slot=1MiB")
    assert "ram.size" in line
    (tmp_path / "file").write_text("")
    disk = ("--set", f"tiers.0.path={tmp_path / 'file'}", "--set", "tiers.0.size=1GiB")
    assert "file" in refusal("daemon", "--socket", str(path), "--set", "ram.slot=1MiB", *disk)
    with Running(path, "ram.slot=16KiB") as daemon:
        assert daemon.status()["stats"]["slots"] == 64
        with daemon.connect() as store:
            assert store.slot_payload_bytes == 3 * PAYLOAD


@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_manager_is_told_when_it_is_ready_and_when_it_stops(
    path: Path, tmp_path: Path, abstract: bool
) -> None:
    name = f"@tiercel-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(30)
        with Running(path, env={"NOTIFY_SOCKET": name}) as daemon:
            assert manager.recv(100) == b"READY=1"
            assert daemon.status()["pid"] == daemon.process.pid
            assert daemon.end() == 0
            assert manager.recv(100) == b"STOPPING=1"


def test_a_manager_that_is_not_there_is_a_warning(path: Path) -> None:
    with Running(path, env={"NOTIFY_SOCKET": "/no/such/notify"}) as daemon:
        assert daemon.end() == 0
        assert "NOTIFY_SOCKET could not be told" in daemon.log.read_text()


def test_help_is_quick_and_loads_no_store() -> None:
    source = (
        "import sys; from tiercel.cli import run; run(['daemon', '--help']); "
        "print([m for m in ('numpy', 'torch', 'tiercel.store') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, cwd=ROOT, env=environ()
    )
    assert done.stdout.strip().endswith("[]")
