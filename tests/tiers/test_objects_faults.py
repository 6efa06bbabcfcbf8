"""Every fault of an object store and of the network before it: an outcome in time, no wrong bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.servers.proxy import (
    BlackHole,
    Corrupt,
    Cut,
    Delay,
    FaultProxy,
    Throttle,
    Truncate,
    swallowing_port,
)
from tests.servers.s3 import USER, S3Server, free_ports
from tests.servers.s3_stub import SECRET, Claim, Hangup, Instead, Refuse, Short, Stall, StubS3

from tiercel.blocks import Header, verify
from tiercel.testing.records import RECORD_BYTES, buffer, chain, record, records
from tiercel.tiers import Fate, Outcome
from tiercel.tiers.objects import PART_BYTES, ObjectsTier
from tiercel.tiers.objects_pace import Pace
from tiercel.tiers.url import TierUrl

CHAIN = chain(8)
KEY = CHAIN.keys[0]
LARGE = 2 * PART_BYTES
DEADLINE_S = 0.5
# A call is over within its deadline; the rest is what two loaded cores add.
SOON_S = DEADLINE_S + 3.0

Call = Callable[[ObjectsTier], object]

CALLS: dict[str, Call] = {
    "read": lambda tier: tier.read([KEY], [buffer(1 << 20)]),
    "read large": lambda tier: tier.read([KEY], [buffer(LARGE)]),
    "read batch": lambda tier: tier.read(CHAIN.keys, [buffer(1 << 20) for _ in CHAIN.keys]),
    "write": lambda tier: tier.write([KEY], [record(CHAIN, payload_bytes=1 << 20)]),
    "write large": lambda tier: tier.write([KEY], [record(CHAIN, payload_bytes=40 << 20)]),
    "delete": lambda tier: tier.delete([KEY]),
    "delete many": lambda tier: tier.delete(chain(2100).keys),
    "peek": lambda tier: tier.peek([KEY]),
    "contains": lambda tier: asked(lambda: tier.contains(CHAIN.keys)),
    "scan": lambda tier: asked(lambda: list(tier.scan())),
}


def test_no_credentials_is_what_it_says(stub: StubS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """None in the environment: the instance is asked, here by an address where nobody answers."""
    for name in USER.environment:
        monkeypatch.delenv(name)
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{port}")
    tier = open_at(stub.url())
    started_s = time.monotonic()
    (outcome,) = tier.read([KEY], [buffer()])
    assert time.monotonic() - started_s < SOON_S
    assert outcome.fate is Fate.FAILED
    assert outcome.reason == "no credentials found (environment, profile, instance metadata)"
    assert stub.requests == []


def asked(ask: Callable[[], object]) -> object:
    """What raises instead, as one failure."""
    try:
        return ask()
    except OSError as fault:
        return [Outcome(Fate.FAILED, str(fault))]


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in USER.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as one:
        yield one


@pytest.fixture
def stub() -> Iterator[StubS3]:
    with StubS3() as one:
        yield one


def open_at(url: str, deadline_s: float = DEADLINE_S) -> ObjectsTier:
    return ObjectsTier.at(TierUrl.parse(url), name="objects", deadline_s=deadline_s)


@pytest.fixture
def tier(server: S3Server, proxy: FaultProxy) -> Iterator[ObjectsTier]:
    """A tier behind the proxy, with a large record in it and nothing else."""
    filler = open_at(server.url(), deadline_s=30)
    filler.delete(CHAIN.keys)
    assert fates(filler.write([KEY], [record(CHAIN, fill=7, payload_bytes=LARGE - 4096)])) == [Fate.OK]
    one = open_at(server.url(port=proxy.port))
    yield one
    one.close()


@pytest.fixture
def stubbed(stub: StubS3) -> Iterator[ObjectsTier]:
    """A tier on the stub, with eight small records in it."""
    one = open_at(stub.url())
    keys, wrote = records(CHAIN)
    assert fates(one.write(keys, wrote)) == [Fate.OK] * 8
    stub.requests.clear()
    yield one
    one.close()


def fates(outcomes: object) -> list[Fate]:
    assert isinstance(outcomes, list)
    return [outcome.fate for outcome in outcomes]


def read_one(tier: ObjectsTier, size_bytes: int = RECORD_BYTES) -> tuple[Outcome, memoryview]:
    into = buffer(size_bytes)
    (outcome,) = tier.read([KEY], [into])
    return outcome, into


def failing_soon(tier: ObjectsTier, call: str) -> list[Outcome]:
    started_s = time.monotonic()
    outcomes = CALLS[call](tier)
    assert time.monotonic() - started_s < SOON_S
    assert set(fates(outcomes)) == {Fate.FAILED}
    assert isinstance(outcomes, list)
    return outcomes


def test_the_calls_of_these_tests_succeed_where_nothing_is_wrong(server: S3Server) -> None:
    tier = open_at(server.url(prefix="control"), deadline_s=30)
    assert fates(CALLS["write large"](tier)) == [Fate.OK]
    assert CALLS["contains"](tier) == [True] + [False] * 7
    assert fates(CALLS["write"](tier)) == [Fate.OK]
    # One page more than the buffer of a mebibyte has.
    assert fates(CALLS["read"](tier)) == [Fate.CORRUPT]
    assert fates(CALLS["read large"](tier)) == [Fate.OK]
    assert set(fates(CALLS["read batch"](tier))) == {Fate.CORRUPT, Fate.MISSING}
    assert isinstance(tier.peek([KEY])[0], bytes)
    assert len(list(tier.scan())) == 1
    assert fates(CALLS["delete"](tier)) == [Fate.OK]
    assert set(fates(CALLS["delete many"](tier))) == {Fate.OK}


@pytest.mark.parametrize("call", CALLS)
def test_d46_a_black_hole_costs_one_deadline(proxy: FaultProxy, tier: ObjectsTier, call: str) -> None:
    assert tier.contains([KEY]) == [True]
    proxy.set(down=BlackHole())
    outcomes = failing_soon(tier, call)
    assert proxy.fired > 0
    assert "timed out" in outcomes[0].reason or "no turn" in outcomes[0].reason
    proxy.heal()
    # A deletion without an answer may have been done nevertheless.
    expected = [[Fate.MISSING], [Fate.OK]] if call == "delete many" else [[Fate.OK]]
    assert fates(tier.read([KEY], [buffer(LARGE)])) in expected


@pytest.mark.parametrize("call", ["read", "write", "contains", "scan"])
def test_a_connection_that_is_never_made_costs_one_deadline(server: S3Server, call: str) -> None:
    with swallowing_port() as port:
        failing_soon(open_at(server.url(port=port)), call)


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_not_there_is_told_of_at_once(server: S3Server, call: str) -> None:
    (port,) = free_ports(1)
    tier = open_at(server.url(port=port), deadline_s=30)
    started_s = time.monotonic()
    outcomes = CALLS[call](tier)
    assert time.monotonic() - started_s < SOON_S
    assert isinstance(outcomes, list)
    assert "no connection" in outcomes[0].reason


@pytest.mark.parametrize(
    "fault", [Truncate(LARGE // 2), Cut(LARGE // 2), BlackHole(LARGE // 2), Truncate(100), Cut(0)], ids=repr
)
def test_an_answer_that_ends_early_is_never_a_record(
    proxy: FaultProxy, tier: ObjectsTier, fault: Truncate | Cut | BlackHole
) -> None:
    """It is tried again; with the fault still there, or no time left, it fails."""
    proxy.set(down=fault)
    outcome, into = read_one(tier, LARGE)
    assert proxy.fired > 0
    assert outcome.fate is Fate.FAILED
    assert not isinstance(verify(into, KEY), Header)
    proxy.heal()
    outcome, into = read_one(tier, LARGE)
    assert outcome.fate is Fate.OK
    assert isinstance(verify(into, KEY), Header)


def test_a_connection_that_broke_once_is_no_failure(proxy: FaultProxy, tier: ObjectsTier) -> None:
    assert tier.contains([KEY]) == [True]
    proxy.reset_connections()
    assert read_one(tier, LARGE)[0].fate is Fate.OK


def test_d32_a_bit_flipped_on_the_way_is_for_the_checksum(proxy: FaultProxy, tier: ObjectsTier) -> None:
    proxy.set(down=Corrupt(at_byte=LARGE // 2))
    outcome, into = read_one(tier, LARGE)
    assert proxy.fired == 1
    assert outcome.fate is not Fate.OK or not isinstance(verify(into, KEY), Header)


@pytest.mark.parametrize("fault", [Cut(1 << 19), BlackHole(1 << 19)], ids=repr)
def test_a_write_that_was_cut_off_leaves_what_was_there(
    server: S3Server, proxy: FaultProxy, tier: ObjectsTier, fault: Cut | BlackHole
) -> None:
    before = read_one(tier, LARGE)[1]
    proxy.set(up=fault)
    assert fates(tier.write([KEY], [record(CHAIN, payload_bytes=1 << 20)])) == [Fate.FAILED]
    assert proxy.fired > 0
    proxy.heal()
    outcome, after = read_one(tier, LARGE)
    assert outcome.fate is Fate.OK
    assert after == before


def test_a_slow_line_is_slow_and_not_wrong(server: S3Server, proxy: FaultProxy) -> None:
    tier = open_at(server.url(port=proxy.port, prefix="slow"), deadline_s=20)
    wrote = record(CHAIN, fill=3, payload_bytes=1 << 20)
    proxy.set(up=Throttle(4e6), down=Delay(0.02))
    assert fates(tier.write([KEY], [wrote])) == [Fate.OK]
    outcome, into = read_one(tier, len(wrote))
    assert outcome.fate is Fate.OK
    assert into == wrote
    assert proxy.fired > 2


def test_parts_make_up_for_a_line_that_is_slow_for_each_connection(
    proxy: FaultProxy, tier: ObjectsTier, server: S3Server
) -> None:
    proxy.set(down=Throttle(20e6))
    patient = open_at(server.url(port=proxy.port), deadline_s=30)
    before = proxy.connections
    assert read_one(patient, LARGE)[0].fate is Fate.OK
    assert proxy.connections - before == 2


def test_a_server_that_dies_in_the_middle_and_comes_back_empty_is_used_again(
    server: S3Server, proxy: FaultProxy, tier: ObjectsTier
) -> None:
    """Killed while it reads and writes; the same tier goes on once it is there again."""
    stop = threading.Event()
    seen: list[Fate] = []
    wrong: list[object] = []

    def work(number: int) -> None:
        key, wrote = CHAIN.keys[number], record(CHAIN, number, payload_bytes=1 << 20)
        while not stop.is_set():
            seen.extend(fates(tier.write([key], [wrote])))
            into = buffer(len(wrote))
            (outcome,) = tier.read([key], [into])
            seen.append(outcome.fate)
            if outcome.fate is Fate.OK and into != wrote:
                wrong.append(outcome)

    workers = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for worker in workers:
        worker.start()
    try:
        assert until(lambda: seen.count(Fate.OK) > 4)
        server.kill()
        failures = seen.count(Fate.FAILED)
        assert until(lambda: seen.count(Fate.FAILED) > failures + 4)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        server.kill()
        server.wipe()
        server.start()
    assert wrong == []
    assert until(lambda: read_one(tier, LARGE)[0].fate is Fate.MISSING)
    assert list(tier.scan()) == []
    assert until(lambda: fates(tier.write([KEY], [record(CHAIN, payload_bytes=4096)])) == [Fate.OK])


@pytest.mark.parametrize("call", ["read", "write", "contains", "delete", "scan"])
def test_d46_a_stopped_server_costs_one_deadline_and_goes_on(
    server: S3Server, tier: ObjectsTier, call: str
) -> None:
    assert tier.contains([KEY]) == [True]
    server.freeze()
    try:
        failing_soon(tier, call)
    finally:
        server.thaw()
    assert until(lambda: read_one(tier, LARGE)[0].fate is Fate.OK)


def until(condition: Callable[[], bool], within_s: float = 30.0) -> bool:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return condition()


# What a real server cannot be made to say.


def test_d47_a_burst_of_slow_down_slows_us_down_and_is_no_failure(stub: StubS3, stubbed: ObjectsTier) -> None:
    pace = stubbed.calls.pace
    at_first = pace.limit
    stub.say(Refuse(503), times=3, methods=("GET",))
    assert fates(stubbed.read(CHAIN.keys, [buffer() for _ in CHAIN.keys])) == [Fate.OK] * 8
    assert stub.said == 3
    assert pace.slowed >= 1
    assert pace.limit < at_first
    stub.most_at_once = 0
    low = pace.limit
    stub.delay_s = 0.05
    stubbed.read(CHAIN.keys, [buffer() for _ in CHAIN.keys])
    assert stub.most_at_once <= low + 1
    stub.delay_s = 0
    for _ in range(40):
        stubbed.read(CHAIN.keys, [buffer() for _ in CHAIN.keys])
    assert pace.limit == at_first


@pytest.mark.parametrize(
    ("refusal", "reason", "tries"),
    [
        (Refuse(503), "asked to slow down (503)", range(2, 9)),
        (Refuse(429, "TooManyRequests"), "asked to slow down (429)", range(2, 9)),
        (Refuse(500, "InternalError"), "answered 500", range(3, 4)),
        (Refuse(403, "AccessDenied"), "access denied (403)", range(1, 2)),
        (Refuse(401, "AuthFailed"), "access denied (401)", range(1, 2)),
        (Refuse(400, "InvalidRequest"), "answered 400", range(1, 2)),
        (Hangup(), "", range(3, 4)),
    ],
    ids=lambda value: repr(value) if isinstance(value, Refuse | Hangup) else "",
)
@pytest.mark.parametrize("call", ["read", "write", "contains", "scan"])
def test_d47_refusals_are_tried_again_a_bounded_number_of_times_then_dropped(
    stub: StubS3, stubbed: ObjectsTier, refusal: Refuse | Hangup, reason: str, tries: range, call: str
) -> None:
    stub.say(refusal, times=1000)
    outcome = failing_soon(stubbed, call)[0]
    assert reason in outcome.reason
    assert SECRET not in outcome.reason
    assert "\n" not in outcome.reason
    if call in ("read", "write"):
        assert len(stub.requests) in tries


@pytest.mark.parametrize("call", ["read", "write", "contains", "scan", "delete"])
def test_d47_a_stall_is_one_deadline(stub: StubS3, stubbed: ObjectsTier, call: str) -> None:
    stub.say(Stall(), times=1000)
    assert "timed out" in failing_soon(stubbed, call)[0].reason


def test_d47_a_stall_in_the_middle_is_one_deadline_and_another_try_where_time_is_left(
    stub: StubS3, stubbed: ObjectsTier
) -> None:
    stub.say(Stall(5000), times=10)
    started_s = time.monotonic()
    assert read_one(stubbed)[0] == Outcome(Fate.FAILED, "timed out")
    assert time.monotonic() - started_s < SOON_S
    assert stub.said == 1


def test_d47_a_body_shorter_than_its_length_is_tried_again_then_fails(
    stub: StubS3, stubbed: ObjectsTier
) -> None:
    stub.say(Short(4096))
    outcome, into = read_one(stubbed, RECORD_BYTES + 4096)
    assert outcome.fate is Fate.OK
    assert isinstance(verify(into, KEY), Header)
    stub.say(Short(4096), times=10)
    assert read_one(stubbed, RECORD_BYTES + 4096)[0] == Outcome(Fate.FAILED, "connection broke")


@pytest.mark.parametrize(
    ("saying", "reason"),
    [
        (Instead(b""), "object has 0 bytes"),
        (Instead(b"x" * 5000), "object has 5000 bytes"),
        (Instead(bytes(RECORD_BYTES + 4096)), f"object has {RECORD_BYTES + 4096} bytes"),
        (Claim(1 << 40), f"object has {1 << 40} bytes"),
        (Claim(RECORD_BYTES + 4096), f"object has {RECORD_BYTES + 4096} bytes"),
    ],
    ids=repr,
)
def test_d47_a_wrong_length_is_corrupt_before_a_byte_is_read(
    stub: StubS3, stubbed: ObjectsTier, saying: Instead | Claim, reason: str
) -> None:
    stub.say(saying)
    outcome, into = read_one(stubbed)
    assert outcome == Outcome(Fate.CORRUPT, reason)
    assert bytes(into) == bytes(RECORD_BYTES)
    # What is in the sockets' buffers was sent; an endless body was not followed.
    assert stub.sent_bytes < 64 << 20
    assert read_one(stubbed)[0].fate is Fate.OK


def test_a_full_place_says_so(stub: StubS3, stubbed: ObjectsTier) -> None:
    stub.say(Refuse(507, "XMinioStorageFull"), times=3)
    (outcome,) = stubbed.write([KEY], [record(CHAIN)])
    assert outcome == Outcome(Fate.FULL, "no space left there (507)")
    assert stub.said == 1


def test_an_object_replaced_between_its_parts_is_read_anew(stub: StubS3) -> None:
    tier = open_at(stub.url(), deadline_s=10)
    one, other = (bytes(record(CHAIN, fill=fill, payload_bytes=LARGE - 4096)) for fill in (1, 2))
    tier.write([KEY], [memoryview(one)])
    stub.replace_after(1, tier.path(KEY), other)
    outcome, into = read_one(tier, LARGE)
    assert outcome.fate is Fate.OK
    assert bytes(into) == other
    assert sum(method == "GET" for method, _ in stub.requests) == 4


def test_a_server_that_knows_no_ranges_gives_whole_records(stub: StubS3) -> None:
    tier = open_at(stub.url(), deadline_s=10)
    wrote = record(CHAIN, fill=3, payload_bytes=LARGE)
    tier.write([KEY], [wrote])
    stub.ranges = False
    assert tier.peek([KEY, CHAIN.keys[1]])[0] == bytes(wrote[:4096])
    tier = open_at(stub.url(), deadline_s=10)
    for _ in range(2):
        outcome, into = read_one(tier, len(wrote) + 4096)
        assert outcome.fate is Fate.OK
        assert into[: len(wrote)] == wrote
    assert read_one(tier, LARGE)[0].fate is Fate.CORRUPT


@pytest.mark.parametrize("name", ["a//b", "../b", "./b", "../../etc/passwd"])
def test_names_that_no_path_may_have_fail_the_listing_and_nothing_else(
    stub: StubS3, stubbed: ObjectsTier, name: str
) -> None:
    stub.listed = [f"tiercel-1/{name}", stubbed.path(KEY)]
    with pytest.raises(OSError, match="empty or dotted step"):
        list(stubbed.scan())
    assert read_one(stubbed)[0].fate is Fate.OK
    stub.listed = ["tiercel-1/ok/b", "/etc/passwd", stubbed.path(KEY)]
    assert [one.key for one in stubbed.scan()] == [KEY]


def test_a_listing_that_broke_off_goes_on_where_it_was(stub: StubS3, stubbed: ObjectsTier) -> None:
    stubbed = open_at(stub.url(), deadline_s=20)
    stub.say(Refuse(503), times=2)
    assert sorted(one.key for one in stubbed.scan()) == sorted(CHAIN.keys)
    assert stub.said == 2


def test_one_record_of_a_batch_that_fails_leaves_the_others(stub: StubS3, stubbed: ObjectsTier) -> None:
    stub.say(Refuse(403), methods=("GET",))
    found = fates(stubbed.read(CHAIN.keys, [buffer() for _ in CHAIN.keys]))
    assert sorted(fate.value for fate in found) == ["failed"] + ["ok"] * 7
    stub.say(Refuse(403), methods=("HEAD",))
    assert sorted(stubbed.contains(CHAIN.keys)) == [False] + [True] * 7


def test_requests_at_once_are_bounded_over_all_callers(stub: StubS3) -> None:
    tier = open_at(stub.url(more="&concurrency=3"), deadline_s=20)
    stub.delay_s = 0.02
    callers = [
        threading.Thread(target=tier.read, args=(CHAIN.keys, [buffer() for _ in CHAIN.keys]))
        for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(stub.requests) == 24
    assert stub.most_at_once == 3


def test_d47_closing_does_not_wait_and_ends_what_waits(stub: StubS3) -> None:
    tier = open_at(stub.url(more="&concurrency=1"), deadline_s=3)
    stub.say(Stall(), times=10)
    answers: list[Outcome] = []

    def read() -> None:
        answers.extend(tier.read([KEY], [buffer()]))

    callers = [threading.Thread(target=read) for _ in range(4)]
    for caller in callers:
        caller.start()
    assert until(lambda: len(stub.requests) == 1)
    started_s = time.monotonic()
    tier.close()
    assert time.monotonic() - started_s < 1
    # The three that waited for a turn are let go at once; the fourth ends with its request.
    assert until(lambda: len(answers) >= 3, 2)
    for caller in callers:
        caller.join(10)
        assert not caller.is_alive()
    assert {answer.fate for answer in answers} == {Fate.FAILED}
    assert "closed" in {answer.reason for answer in answers}


def test_turns_are_taken_in_the_order_of_asking() -> None:
    """Who comes back at once does not keep out who waits."""
    pace, order = Pace(1), []

    def wait() -> None:
        assert pace.enter(time.monotonic() + 10)
        order.append("who waited")
        pace.leave()

    assert pace.enter(time.monotonic() + 10)
    waiter = threading.Thread(target=wait)
    waiter.start()
    assert until(lambda: len(pace._waiting) == 1, 10)
    pace.leave()
    assert pace.enter(time.monotonic() + 10)
    order.append("who came back")
    waiter.join()
    assert order == ["who waited", "who came back"]


def test_the_pace_halves_and_grows_back() -> None:
    pace = Pace(8)
    pace.slow_down(0.05)
    pace.slow_down(0.05)
    assert (pace.limit, pace.slowed) == (4, 1)
    assert not pace.enter(time.monotonic() + 0.01)
    assert pace.enter(time.monotonic() + 5)
    pace.leave()
    for _ in range(100):
        pace.went_well()
    assert pace.limit == 8
    for _ in range(6):
        time.sleep(0.002)
        pace.slow_down(0.001)
    assert pace.limit == 1
    assert pace.enter(time.monotonic() + 5)
    assert not pace.enter(time.monotonic() + 0.05)
    pace.close()
    assert not pace.enter(time.monotonic() + 5)
