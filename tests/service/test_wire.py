"""The protocol's packets: they come back as sent, and nothing that is no packet gets through."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.support import chain

from tiercel.service import wire
from tiercel.store import (
    Choice,
    Decision,
    Fault,
    Overview,
    PrefixNode,
    ScopeUse,
    StoreCounters,
    StoreStats,
    TierCounters,
    TierStats,
)

NAMED = wire.named(chain(3))
STATS = StoreStats(8, 4096, 3, 5, 1, 0, 0, StoreCounters(lookups=3, loaded={"disk": 2}),
                   (TierStats("disk", 2, 9, None, 0, "closed", TierCounters(read_blocks=5), 3),))  # fmt: skip
DECISION = Decision(
    prompt_tokens=9, block_tokens=4, reason="why", found={"ram": 2}, reused_tokens={"ram": 8},
    computed_tokens=1, choice=Choice(2, 0.1, 0.2, 0.3, 1, 0.2),
    action="load", ttft_s=0.1, saved_s=0.2, done=True,
)  # fmt: skip
OVERVIEW = Overview(
    1.5, STATS, (ScopeUse("ab", "m", "", "s", {"ram": 2}, {"ram": 8192}),), 1,
    (PrefixNode("12", "", "ab", 0, 0, 2, {"ram": 2}, {"ram": 8192}, 0, 0),),
    (Fault("read", "disk", "gone", 2, 1.0),), (DECISION,),
)  # fmt: skip
QUESTIONS: list[wire.Question] = [
    wire.Hello(1, 7, 9), wire.Lookup(NAMED, 0.5, 1), wire.Acquire(NAMED, 1.0, 0, 4), wire.Next(2, 3),
    wire.BeginStore(NAMED, 0, 3, 4096, 1.0, 8), wire.Take(4), wire.Commit(), wire.Release(),
    wire.Pin(NAMED, 3.0), wire.Prefetch(NAMED, 3.0),
    wire.Demote(NAMED, 1.0), wire.Drop(NAMED, 1.0), wire.Remember(b"t", "s", (NAMED, NAMED)),
    wire.Recall(b"", "s"), wire.Clear(b"12345678", 1.0), wire.Clear(None, 1.0),
    wire.EventsSince(4, b"12345678"), wire.Flush(1.0), wire.AskStats(),
    wire.Report((DECISION, DECISION), 3), wire.AskDecisions(4), wire.AskOverview(4), wire.AskChain("12"),
]  # fmt: skip
ANSWERS: list[wire.Answer] = [
    wire.Welcome(1, 7, b"arena", 8192, 5), wire.Found(("ram", "disk")),
    wire.Blocks((wire.Block(0, 3, 4096, "ram"), wire.Block(1, 4, 4096))), wire.Number(3),
    wire.Recalled((NAMED,)), wire.Recalled(()),
    wire.Happened(5, True, ((True, b"k" * 32, "ram"),)), wire.Figures(1, 2, 3.0, STATS),
    wire.Figures(1, 2, 3.0, None), wire.Decided((DECISION,)), wire.Seen(OVERVIEW), wire.Refused("no"),
]  # fmt: skip


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: type(one).__name__)
def test_a_question_arrives_as_it_was_sent(
    pair: tuple[socket.socket, socket.socket], question: wire.Question
) -> None:
    wire.send(pair[0], question)
    assert wire.receive_question(pair[1], 1.0) == question


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda one: type(one).__name__)
def test_an_answer_arrives_as_it_was_sent(
    pair: tuple[socket.socket, socket.socket], answer: wire.Answer
) -> None:
    wire.send(pair[0], answer)
    assert wire.receive_answer(pair[1], 1.0) == (answer, [])


def test_every_message_is_tried_above() -> None:
    assert {type(one) for one in QUESTIONS} == set(wire.Question.__args__)
    assert {type(one) for one in ANSWERS} == set(wire.Answer.__args__)


def test_a_descriptor_comes_along(pair: tuple[socket.socket, socket.socket]) -> None:
    fd = os.memfd_create("x")
    os.write(fd, b"hello")
    wire.send(pair[0], ANSWERS[0], [fd])
    os.close(fd)
    answer, (got,) = wire.receive_answer(pair[1], 1.0)
    assert answer == ANSWERS[0]
    assert os.pread(got, 5, 0) == b"hello"
    os.close(got)


@pytest.mark.parametrize(
    "packet", [b"\x03\x00\x00\x00abc", b"\xff\xff\xff\xff", b"\x03\x00", b"\x09\x00\x00\x00a"]
)
def test_a_descriptor_that_comes_with_no_message_is_closed(
    pair: tuple[socket.socket, socket.socket], packet: bytes
) -> None:
    near, far = pair
    passed = os.open(os.devnull, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(near, [packet], [passed])
    os.close(passed)
    with pytest.raises(wire.WireError):
        wire.receive_answer(far, 0.1)
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_chain_survives_and_half_a_key_does_not() -> None:
    assert wire.chain_of(NAMED) == chain(3)
    with pytest.raises(wire.WireError, match="not a whole number"):
        wire.chain_of(wire.Named(b"", b"", b"k" * 33))


def test_a_client_that_leaves_is_no_fault(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert wire.receive_question(pair[1], 1.0) is None


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (struct.pack("<I", wire.PACKET_BYTES_MAX + 1), "accepted are"),
        (struct.pack("<I", 5) + b"abcde", "not a message"),
        (struct.pack("<I", 0), "not a message"),
        (struct.pack("<I", 1) + b"\x80", "not a message"),
        (struct.pack("<I", 9) + b"abc", "ended in the middle"),
        (b"\x01", "ended in the middle"),
        (struct.pack("<I", 12) + b"\x81\xa4type\xa5other", "not a message"),
    ],
)
def test_what_is_no_packet_is_refused(
    pair: tuple[socket.socket, socket.socket], packet: bytes, why: str
) -> None:
    pair[0].sendall(packet)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(wire.WireError, match=why):
        wire.receive_question(pair[1], 1.0)


def test_half_a_packet_is_not_waited_for_without_end(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(struct.pack("<I", 9) + b"abc")
    with pytest.raises(wire.WireError):
        wire.receive_question(pair[1], 0.05)
    with pytest.raises(wire.WireError, match="no answer"):
        wire.receive_answer(pair[0], 0.05)


def test_a_packet_that_trickles_is_put_together_in_time(pair: tuple[socket.socket, socket.socket]) -> None:
    wire.send(pair[0], QUESTIONS[1])
    packet = pair[1].recv(1 << 16)

    def trickle() -> None:
        for at in range(0, len(packet), 7):
            pair[1].sendall(packet[at : at + 7])

    thread = threading.Thread(target=trickle)
    thread.start()
    assert wire.receive_question(pair[0], 5.0) == QUESTIONS[1]
    thread.join()


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_d10_any_bytes_are_a_message_or_refused(noise: bytes) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(struct.pack("<I", len(noise)) + noise)
        try:
            question = wire.receive_question(other, 1.0)
        except wire.WireError:
            return
        assert isinstance(question, wire.Question)
