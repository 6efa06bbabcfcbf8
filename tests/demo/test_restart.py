"""The second process seen from the first: whatever it does, the first gets messages or one line, in time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tiercel.demo.messages import Done, Job, Saying
from tiercel.demo.restart import RestartError, second_process
from tiercel.demo.talk import Talk

JOB = Job(
    model_dir="/nowhere/model", dtype="auto", block_tokens=64, ram_bytes=1 << 30, cache_dir="/nowhere/cache",
    salt="s", answer_tokens=4, origin_s=0.0, talks=[Talk(0, "One", ("What?",))],
)  # fmt: skip
SAY = 'print(\'{"type":"saying","text":"hello"}\', flush=True)'
DONE = 'print(\'{"type":"done","spans":[],"gaps":[],"notes":["n"]}\', flush=True)'


def run(code: str, deadline_s: float = 60.0) -> list[object]:
    return list(second_process(JOB, deadline_s, (sys.executable, "-c", code)))


def test_messages_arrive_in_order() -> None:
    assert run(f"{SAY}; {DONE}") == [Saying("hello"), Done([], [], ["n"])]


def test_the_job_arrives_whole() -> None:
    code = f"import sys, json; job = json.load(sys.stdin); assert job['talks'][0]['name'] == 'One'; {DONE}"
    assert len(run(code)) == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('it broke')", r"ended early \(exit code 1\): it broke"),
        (f"{SAY}; raise ValueError('what')", "ended early .*ValueError: what"),
        ("pass", r"ended early \(exit code 0\)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9"),
        ("print('no message')", "something that is no message"),
        ('print(\'{"type":"other"}\')', "something that is no message"),
        ('print(\'{"type":"failed","reason":"no disk"}\')', "the second process failed: no disk"),
    ],
)
def test_each_way_to_fail_is_one_line(code: str, said: str) -> None:
    with pytest.raises(RestartError, match=said) as caught:
        run(code)
    assert "\n" not in str(caught.value)


def test_a_process_that_hangs_is_ended_at_the_deadline(tmp_path: Path) -> None:
    born = tmp_path / "pid"
    code = f"import os, time; open({str(born)!r}, 'w').write(str(os.getpid())); {SAY}; time.sleep(600)"
    with pytest.raises(RestartError, match="was not done after 3 s"):
        run(code, deadline_s=3.0)
    assert not Path(f"/proc/{born.read_text()}").exists()


def test_a_listener_that_leaves_takes_the_process_with_it(tmp_path: Path) -> None:
    born = tmp_path / "pid"
    code = f"import os, time; open({str(born)!r}, 'w').write(str(os.getpid())); {SAY}; time.sleep(600)"
    messages = second_process(JOB, 60.0, (sys.executable, "-c", code))
    assert next(messages) == Saying("hello")
    messages.close()
    pid = born.read_text()
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(RestartError, match="cannot be started: No such file"):
        list(second_process(JOB, 5.0, ("/nowhere/python",)))


def test_the_real_second_process_fails_in_one_line_without_a_model() -> None:
    with pytest.raises(RestartError, match="the second process failed: model folder /nowhere/model does not"):
        list(second_process(JOB, 120.0))
