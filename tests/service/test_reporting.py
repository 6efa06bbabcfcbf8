"""Reports to a daemon: nobody waits for them, none is kept for ever, and what is lost is told."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

from tests.service.running import Running
from tests.store.support import eventually

from tiercel.service import wire
from tiercel.service.reporting import Reporting
from tiercel.store import Decision


def decision(number: int = 1) -> Decision:
    return Decision(prompt_tokens=number, block_tokens=1, reason="")


class Daemon:
    """Takes reports; `open` cleared it hangs, `there` False it is away."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.there = True
        self.got: list[int] = []
        self.lost = 0
        self.calls = 0

    def answered(self, reporting: Reporting, calls: int) -> bool:
        return self.calls == calls and not reporting._sending

    def take(self, decisions: tuple[Decision, ...], lost: int) -> bool:
        self.open.wait(10)
        self.calls += 1
        if self.there:
            self.got += [one.prompt_tokens for one in decisions]
            self.lost += lost
        return self.there


def test_reports_arrive_in_order_a_few_at_once() -> None:
    daemon = Daemon()
    reporting = Reporting(daemon.take)
    daemon.open.clear()
    for number in range(200):
        assert reporting.add(decision(number)).prompt_tokens == number
    daemon.open.set()
    assert eventually(lambda: daemon.got == list(range(200)))
    assert daemon.calls < 10
    reporting.close()


def test_a_daemon_that_hangs_is_not_waited_for_and_what_is_lost_is_told() -> None:
    daemon = Daemon()
    reporting = Reporting(daemon.take)
    daemon.open.clear()
    began_s = time.monotonic()
    for number in range(1000):
        reporting.add(decision(number))
    assert time.monotonic() - began_s < 5
    daemon.open.set()
    assert eventually(lambda: len(daemon.got) + daemon.lost == 1000)
    assert daemon.lost > 600
    assert daemon.got == sorted(daemon.got)
    reporting.close()


def test_what_a_daemon_missed_while_it_was_away_is_told_when_it_is_back() -> None:
    daemon = Daemon()
    reporting = Reporting(daemon.take)
    daemon.there = False
    for calls in (1, 2, 3):
        reporting.add(decision())
        assert eventually(partial(daemon.answered, reporting, calls))
    daemon.there = True
    reporting.add(decision(7))
    assert eventually(lambda: (daemon.got, daemon.lost) == ([7], 3))
    reporting.close()


def test_d39_what_is_no_message_is_lost_and_nobody_hears_of_it() -> None:
    daemon = Daemon()
    reporting = Reporting(daemon.take)
    reporting.add(decision(1 << 80))
    reporting.add(Decision(prompt_tokens=1, block_tokens=1, reason=object()))  # type: ignore[arg-type]
    reporting.add(decision(2))
    assert eventually(lambda: (daemon.got, daemon.lost) == ([2], 2))
    reporting.close()


def test_the_last_reports_are_sent_when_a_client_leaves(tmp_path: Path) -> None:
    with Running(tmp_path / "s") as daemon:
        with daemon.connect() as store:
            for number in range(50):
                store.report(decision(number))
        with daemon.connect() as other:
            assert other.stats().requests.requests == 50
            assert [one.prompt_tokens for one in other.decisions(2)] == [49, 48]
            assert len(other.overview(3).decisions) == 3
            many = wire.Report((decision(),) * 2000, 3)
            assert other._call(many, wire.Number, 5) is not None
            told = other.stats().requests
            assert (told.requests, told.lost) == (50 + 1024, 976 + 3), "a client cannot keep a daemon busy"
            daemon.kill()
            began_s = time.monotonic()
            other.report(decision())
            assert time.monotonic() - began_s < 1
            assert other.overview().stats.slots == 0
            assert (other.decisions(), other.chain_of("12")) == ([], None)
