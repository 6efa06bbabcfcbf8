"""The private daemon: one per name, started by whoever comes first, gone after the last, back when killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.service.running import Script, environ
from tests.service.test_faults import get_any
from tests.store.support import PAYLOAD, chain, eventually, put

from tiercel.config import Config
from tiercel.errors import DaemonError
from tiercel.service import RemoteStore, connect, spawn

CLIENT = """
import sys
from tests.store.support import PAYLOAD, chain, eventually, get, put
from tiercel.config import Config
from tiercel.service import connect, spawn
spawn.IDLE_EXIT = "1s"
store = connect(Config.load(None, overrides={"ram.size": "1MiB"}), PAYLOAD, private="race")
print(store.figures().pid, flush=True)
sys.stdin.read()
put(store, chain(4))
# Another process may be writing the same blocks just now.
assert eventually(lambda: store.lookup(chain(4)).blocks == 4)
print(get(store, chain(4)), flush=True)
store.close()
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of this test's own; daemons that are still there at the end are ended."""
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(spawn, "IDLE_EXIT", "1s")
    yield folder
    assert eventually(lambda: not daemons(folder), 20), daemons(folder)


def daemons(folder: Path) -> list[int]:
    """Process ids of daemons that serve below `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if b"daemon" in command and any(os.fsencode(folder) in one for one in command) and state != "Z":
                found.append(int(entry.name))
    return found


def private(name: str = "one", **settings: str) -> RemoteStore:
    config = Config.load(None, {}, {"ram.size": "1MiB", **settings})
    return connect(config, PAYLOAD, private=name)


def pid_of(store: RemoteStore) -> int:
    figures = store.figures()
    assert figures is not None
    return figures.pid


def test_of_eight_processes_one_starts_it_and_all_share_it(runtime: Path) -> None:
    clients = [Script(CLIENT) for _ in range(8)]
    try:
        pids = {client.line() for client in clients}
        assert len(pids) == 1
        assert daemons(runtime) == [int(pids.pop())]
        for client in clients:
            client.go()
        assert {client.line() for client in clients} == {str(["ram"] * 4)}
    finally:
        for client in clients:
            client.__exit__()
    assert eventually(lambda: not daemons(runtime)), "it ends when the last has left"
    assert not list(runtime.rglob("*.sock"))


def test_two_names_are_two_daemons_and_one_name_is_one(runtime: Path) -> None:
    with private("a") as first, private("b") as other, private("a") as same:
        assert pid_of(first) == pid_of(same) != pid_of(other)
        put(first, chain(4))  # type: ignore[arg-type]
        assert get_any(same, chain(4)) == ["ram"] * 4
        assert get_any(other, chain(4)) == []
        assert len(daemons(runtime)) == 2


def test_it_lives_while_a_client_does_nothing_and_ends_after_a_client_that_was_killed(runtime: Path) -> None:
    with Script(CLIENT) as client:
        pid = int(client.line())
        time.sleep(2.5)
        assert daemons(runtime) == [pid], "idle is not gone"
        client.process.kill()
        client.process.wait(10)
    assert eventually(lambda: not daemons(runtime))


def test_killed_it_is_started_again_as_often_as_it_takes(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.service.link._RESPAWN_PAUSE_S", 0.5)
    disk = {"tiers.0.path": str(tmp_path / "kv"), "tiers.0.size": "10MiB"}
    with private("one", **disk) as store:
        assert put(store, chain(4)) == 4  # type: ignore[arg-type]
        assert store.flush()
        for _ in range(3):
            pid = pid_of(store)
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda pid=pid: pid not in daemons(runtime))  # type: ignore[misc]
            assert get_any(store, chain(4)) == [], "a miss, nothing else"
            assert eventually(lambda: store.lookup(chain(4)).blocks == 4)
            assert get_any(store, chain(4)) == ["disk"] * 4
        # Killed while it comes up, and nobody asks meanwhile: it must not be given up for good.
        pid = pid_of(store)
        os.kill(pid, signal.SIGKILL)
        # Started again at most so often; a call that comes too early does not start it, a later one does.
        assert eventually(lambda: store.lookup(chain(4)).blocks >= 0 and daemons(runtime) not in ([], [pid]))
        for pid in daemons(runtime):
            os.kill(pid, signal.SIGKILL)
        time.sleep(2.0)
        assert eventually(lambda: store.lookup(chain(4)).blocks == 4)


def test_one_that_is_started_again_waits_for_its_client(runtime: Path) -> None:
    """It would end after a second without a client; the client asks again only much later."""
    with private() as store:
        os.kill(pid_of(store), signal.SIGKILL)
        store.lookup(chain(4))
        assert eventually(lambda: store.up), "it is visited without a call"
        pid = daemons(runtime)
        assert len(pid) == 1
        time.sleep(3.0)
        assert daemons(runtime) == pid
        assert pid_of(store) == pid[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ram.size": "900TiB"}, r"daemon at .*: RAM tier of \d+ bytes does not fit"),
        ({"ram.size": "900TiB", "ram.slot": "1MiB"}, r"^error: RAM tier of \d+ bytes does not fit"),
        ({"tiers.0.path": "/proc/tiercel", "tiers.0.size": "1GiB"}, r"/proc/tiercel"),
    ],
)
def test_what_it_cannot_do_is_one_line_for_the_engine(settings: dict[str, str], said: str) -> None:
    with pytest.raises(DaemonError, match=said) as caught:
        private(**settings)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_password_is_not_among_its_arguments(runtime: Path) -> None:
    with private(**{"tiers.0.kind": "valkey", "tiers.0.url": "redis://:hunter2@127.0.0.1:1/0"}) as store:
        (pid,) = daemons(runtime)
        assert b"hunter2" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"hunter2" in Path(f"/proc/{pid}/environ").read_bytes(), "the control: it has it"
        log = next(runtime.rglob("*.log")).read_text()
        assert "hunter2" not in log
        assert store.figures() is not None


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU leaves nothing to pin to")
def test_it_may_run_on_every_cpu_though_the_engine_is_pinned() -> None:
    allowed = os.sched_getaffinity(0)
    source = f"import os; os.sched_setaffinity(0, [{min(allowed)}])\n{CLIENT}"
    with Script(source) as client:
        pid = int(client.line())
        assert os.sched_getaffinity(client.process.pid) == {min(allowed)}, "the control"
        assert os.sched_getaffinity(pid) == allowed
        client.go()
        client.line()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU leaves nothing to bind to")
def test_it_may_run_on_every_cpu_though_the_engine_preloads_an_openmp_that_binds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).parent / "lib" / "libgomp.so.1"
    if not library.exists():
        pytest.skip("torch brings no libgomp")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0 1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with Script(CLIENT) as client:
        pid = int(client.line())
        assert len(os.sched_getaffinity(client.process.pid)) == 1, "the control"
        assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
        client.go()
        client.line()


def test_ctrl_c_at_the_engine_does_not_reach_it(runtime: Path) -> None:
    with private() as store:
        pid = pid_of(store)
        assert os.getsid(pid) == pid != os.getsid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_folder_of_another_user_is_not_used(runtime: Path) -> None:
    (runtime / "tiercel").mkdir()
    os.chown(runtime / "tiercel", 1234, 1234)
    with pytest.raises(DaemonError, match="belongs to another user; set XDG_RUNTIME_DIR"):
        private()


def test_a_runtime_directory_that_cannot_be_used_is_one_line(runtime: Path) -> None:
    (runtime / "tiercel").write_text("")
    with pytest.raises(DaemonError, match=r"cannot be used: "):
        private()


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "private.sock"
    path.with_suffix(".log").mkdir()
    with pytest.raises(DaemonError, match=r"no daemon can be started at '.*': Is a directory"):
        spawn.ensure(path, {})


def test_without_a_runtime_directory_it_is_a_private_one_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    path = spawn.private_socket("x" * 1000, {})
    assert path.parent.name == f"tiercel-{os.geteuid()}"
    assert len(os.fsencode(path)) < 107
    assert spawn.private_socket("x", {}) == spawn.private_socket("x", {}) != spawn.private_socket("y", {})


@pytest.mark.parametrize("letters", [1, 200])
def test_a_runtime_directory_too_deep_for_a_socket_is_left_alone(tmp_path: Path, letters: int) -> None:
    runtime = tmp_path / ("d" * letters)
    runtime.mkdir()
    there = Path(runtime, "tiercel") in spawn.private_socket("x", {"XDG_RUNTIME_DIR": str(runtime)}).parents
    assert there == (len(str(runtime)) < 70)


def test_two_engines_with_a_hung_starter_do_not_wait_without_end(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "_READY_S", 0.5)
    path = spawn.private_socket("one")
    path.parent.mkdir(parents=True)
    source = f"import fcntl, sys; f = open({str(path.with_suffix('.lock'))!r}, 'w'); fcntl.flock(f, 2); print(1, flush=True); sys.stdin.read()"  # noqa: E501
    with Script(source) as holder:
        holder.line()
        with pytest.raises(DaemonError, match="another process has been starting"):
            private()


def test_no_daemon_named_and_none_of_ones_own() -> None:
    with pytest.raises(DaemonError, match=r"no daemon is named: set daemon\.socket"):
        connect(Config.load(None, {}, {}), PAYLOAD)


def test_it_starts_with_the_settings_of_its_engine_and_no_others() -> None:
    """What the shell says counts for the engine; its daemon gets what the engine made of it."""
    source = CLIENT.replace("print(store.figures().pid", "print(store.stats().slots")
    done = subprocess.run(
        [sys.executable, "-c", source.replace('"1MiB"', '"2MiB"')],
        input="", capture_output=True, text=True, timeout=60, check=True, cwd=Path(__file__).parents[2],
        env=environ({"TIERCEL_RAM_SIZE": "4MiB"}),
    )  # fmt: skip
    first: Any = done.stdout.split()[0]
    assert int(first) == (2 << 20) // (2 * PAYLOAD)


def test_a_manager_that_waits_for_the_engine_does_not_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(0.5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with private():
            pass
        with pytest.raises(TimeoutError):
            manager.recv(100)


def test_what_engines_long_gone_have_left_is_swept_and_nothing_else(runtime: Path) -> None:
    with private("runs"):
        (folder,) = {one.parent for one in runtime.rglob("*.log")}
        running = {one.name for one in folder.iterdir()}
        for name in (
            "private-old.log",
            "private-old.lock",
            "private-old.sock",
            "private-new.log",
            "other.log",
        ):
            (folder / name).write_text("")
        for one in folder.iterdir():
            if one.name != "private-new.log":
                os.utime(one, (1, 1))
        with private("another"):
            left = {one.name for one in folder.iterdir()}
    assert left >= running | {"private-new.log", "other.log"}
    assert not [name for name in left if name.startswith("private-old")]
