"""What daemon and client say to each other: msgpack messages in length-framed packets over a Unix socket.

    packet = length of the message (4 bytes, little endian) + one msgpack message (`msgspec` tagged structs)

One question, one answer, in order. A connection carries at most one lease; whatever it holds dies with it.
Bytes of blocks never pass here: answers name slots of the arena, whose descriptor comes with the welcome.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from tiercel.blocks import KEY_BYTES, BlockKey, Chain
from tiercel.codecs import LossyTiers
from tiercel.store import Choice, Decision, Overview, Prompt, Sight, StoreStats

VERSION = 2
# A key is 32 bytes: room for a prompt of 250,000 blocks.
PACKET_BYTES_MAX = 8 << 20
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid: `struct ucred`


class WireError(Exception):
    """The other side is gone, too slow, or does not speak this protocol."""


class Named(msgspec.Struct, frozen=True):
    """A chain on the wire: its root, its description and its keys end to end."""

    root: bytes
    info: bytes
    keys: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a client. `payload_bytes`: the largest block it will handle; 0 if none."""

    version: int
    pid: int
    payload_bytes: int = 0


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    chain: Named
    deadline_s: float
    start: int
    prompt: Prompt | None = None


class Acquire(msgspec.Struct, frozen=True, tag="acquire"):
    chain: Named
    deadline_s: float
    start: int
    limit: int
    backward: bool = False


class Next(msgspec.Struct, frozen=True, tag="next"):
    """Give back `advance` blocks of the read lease, then answer up to `limit` further ones."""

    advance: int
    limit: int


class BeginStore(msgspec.Struct, frozen=True, tag="begin"):
    chain: Named
    start: int
    stop: int
    payload_bytes: int
    deadline_s: float
    limit: int
    sight: Sight = Sight.NEW


class Take(msgspec.Struct, frozen=True, tag="take"):
    limit: int


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    pass


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End the lease; blocks not committed are dropped."""


class Pin(msgspec.Struct, frozen=True, tag="pin"):
    """Pin for `ttl_s` seconds; 0 unpins."""

    chain: Named
    ttl_s: float


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    chain: Named
    deadline_s: float


class Demote(msgspec.Struct, frozen=True, tag="demote"):
    chain: Named
    deadline_s: float


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    chain: Named
    deadline_s: float


class Remember(msgspec.Struct, frozen=True, tag="remember"):
    """A tenant's session left these chains; none: forget it."""

    tenant: bytes
    session: str
    chains: tuple[Named, ...]


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    tenant: bytes
    session: str


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    tag: bytes | None
    deadline_s: float


class EventsSince(msgspec.Struct, frozen=True, tag="events"):
    after: int
    tag: bytes


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    deadline_s: float


class Report(msgspec.Struct, frozen=True, tag="report"):
    """What became of some requests; `lost` others cannot be told of any more."""

    decisions: tuple[Decision, ...]
    lost: int = 0


class AskDecisions(msgspec.Struct, frozen=True, tag="decisions"):
    limit: int


class AskOverview(msgspec.Struct, frozen=True, tag="overview"):
    limit: int


class AskChain(msgspec.Struct, frozen=True, tag="chain"):
    """Which blocks a prefix of an overview names."""

    prefix: str


class AskStats(msgspec.Struct, frozen=True, tag="stats"):
    pass


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `Hello`. With an arena (`slots` > 0) its descriptor comes along.

    `lossy` is what an engine marks its blocks with: an older client that does not know of it is served
    exactly.
    """

    version: int
    pid: int
    arena: bytes = b""
    slot_bytes: int = 0
    slots: int = 0
    lossy: LossyTiers = LossyTiers()


class Found(msgspec.Struct, frozen=True, tag="found"):
    sources: tuple[str, ...]
    choice: Choice | None = None


class Block(msgspec.Struct, frozen=True, array_like=True):
    index: int
    slot: int
    payload_bytes: int
    source: str = ""


class Blocks(msgspec.Struct, frozen=True, tag="blocks"):
    blocks: tuple[Block, ...]


class Number(msgspec.Struct, frozen=True, tag="number"):
    value: int


class Recalled(msgspec.Struct, frozen=True, tag="recalled"):
    """Answer to `Recall`; empty for a session that is not known."""

    chains: tuple[Named, ...]


class Happened(msgspec.Struct, frozen=True, tag="happened"):
    next: int
    lost: bool
    events: tuple[tuple[bool, bytes, str], ...]


class Figures(msgspec.Struct, frozen=True, tag="figures"):
    """Answer to `AskStats`; `stats` is None while no engine has opened the store yet."""

    pid: int
    clients: int
    uptime_s: float
    stats: StoreStats | None


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    decisions: tuple[Decision, ...]


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    overview: Overview


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The question cannot be answered; `reason` is one line for a person."""

    reason: str


Question = (
    Hello | Lookup | Acquire | Next | BeginStore | Take | Commit | Release | Pin | Prefetch | Demote
    | Drop | Remember | Recall | Clear | EventsSince | Flush | Report
    | AskDecisions | AskOverview | AskChain | AskStats
)  # fmt: skip
Answer = Welcome | Found | Blocks | Number | Recalled | Happened | Figures | Decided | Seen | Refused
Message = TypeVar("Message")

_encode = msgspec.msgpack.Encoder().encode
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)


def named(chain: Chain) -> Named:
    """A chain as it goes over the wire."""
    return Named(chain.root, chain.info, b"".join(chain.keys))


def chain_of(name: Named) -> Chain:
    """The chain back. Raises WireError for keys that are none."""
    keys = name.keys
    if len(keys) % KEY_BYTES:
        raise WireError(f"keys of {len(keys)} bytes are not a whole number of keys")
    return Chain(
        name.root,
        name.info,
        tuple(BlockKey(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)),
    )


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other side."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def send(sock: socket.socket, message: Question | Answer, fds: Sequence[int] = ()) -> None:
    """Send one message within the socket's timeout. Raises WireError."""
    packet = _encode(message)
    if len(packet) > PACKET_BYTES_MAX:
        raise WireError(f"a message of {len(packet)} bytes; accepted are {PACKET_BYTES_MAX}")
    packet = _LENGTH.pack(len(packet)) + packet
    try:
        if fds:
            packet = packet[socket.send_fds(sock, [packet], list(fds)) :]
        sock.sendall(packet)
    except OSError as fault:
        raise WireError(f"sending failed: {fault}") from None


def receive_question(sock: socket.socket, patience_s: float) -> Question | None:
    """The next question, waited for without end; once it begins it must be whole within `patience_s`.

    None when the client closed the connection. Raises WireError.
    """
    sock.settimeout(None)
    try:
        first = sock.recv(1)
    except OSError as fault:
        raise WireError(f"receiving failed: {fault}") from None
    if not first:
        return None
    until_s = time.monotonic() + patience_s
    head = first + _exactly(sock, _LENGTH.size - 1, until_s)
    packet = _exactly(sock, _length(head), until_s)
    sock.settimeout(patience_s)
    return _decode(_questions, packet)


def receive_answer(sock: socket.socket, timeout_s: float) -> tuple[Answer, list[int]]:
    """The answer, whole within `timeout_s`, and descriptors that came along. Raises WireError."""
    until_s = time.monotonic() + timeout_s
    try:
        sock.settimeout(max(timeout_s, 0.001))
        head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
    except OSError as fault:
        raise WireError(f"no answer: {fault}") from None
    try:
        head += _exactly(sock, _LENGTH.size - len(head), until_s) if head else b""
        if not head:
            raise WireError("the daemon closed the connection")
        return _decode(_answers, _exactly(sock, _length(head), until_s)), fds
    except WireError:
        for fd in fds:
            os.close(fd)
        raise


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > PACKET_BYTES_MAX:
        raise WireError(f"a message of {length} bytes; accepted are {PACKET_BYTES_MAX}")
    return int(length)


def _exactly(sock: socket.socket, count: int, until_s: float) -> bytes:
    part = bytearray(count)
    view = memoryview(part)
    while view:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise WireError("a message was not finished in time")
        try:
            sock.settimeout(left_s)
            got = sock.recv_into(view)
        except OSError as fault:
            raise WireError(f"receiving failed: {fault}") from None
        if not got:
            raise WireError("the connection ended in the middle of a message")
        view = view[got:]
    return bytes(part)


def _decode(decoder: msgspec.msgpack.Decoder[Message], packet: bytes) -> Message:
    try:
        return decoder.decode(packet)
    except msgspec.MsgspecError as fault:
        raise WireError(f"not a message of this protocol: {fault}") from None
