"""Make traces of a chosen shape: sessions of several turns over shared documents, with idle gaps between.

Deterministic for a seed. Requests come out in order of time, one at a time, with memory for the sessions
that are open. It writes Tiercel's own trace format; no prompt text exists, only block numbers.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from itertools import accumulate, count
from typing import TextIO

import msgspec

from tiercel.errors import ConfigError
from tiercel.plan.simulate.trace import header_line

LENGTH_SIGMA = 0.8
"""Spread of drawn lengths: standard deviation of the logarithm, so that a few are several times the mean."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the traffic looks like. Lengths are means in tokens, `rate_per_s` counts requests.

    Sessions start as a Poisson process and have a geometric number of turns. A share `document_share` of
    them asks about one of `documents` documents, drawn by Zipf's law with exponent `zipf`. Each turn
    repeats everything before it and adds `turn_tokens`; the answer before it has `output_tokens`.
    """

    requests: int = 10_000
    rate_per_s: float = 3.0
    turns: float = 4.0
    idle_s: float = 60.0
    system_tokens: int = 1024
    documents: int = 100
    document_tokens: int = 8192
    document_share: float = 0.5
    zipf: float = 1.0
    turn_tokens: int = 800
    output_tokens: int = 300
    context_tokens_max: int = 131_072
    block_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("requests", "rate_per_s", "turn_tokens", "context_tokens_max", "block_tokens")
        for item in fields(self):
            value = getattr(self, item.name)
            least, word = (1, "1 or more") if item.name == "turns" else (0, "0 or more")
            bad = not math.isfinite(value) or value < least or (item.name in positive and value == 0)
            if bad and item.name != "seed":
                accepted = "more than 0" if item.name in positive else word
                raise ConfigError(f"{item.name} is {value:g}; accepted: {accepted}")
        if self.system_tokens + self.document_tokens >= self.context_tokens_max:
            raise ConfigError(
                f"context_tokens_max is {self.context_tokens_max}; accepted: more than system_tokens and "
                f"document_tokens together ({self.system_tokens + self.document_tokens})"
            )
        if self.document_share > 1:
            raise ConfigError(f"document_share is {self.document_share:g}; accepted: 0 to 1")
        if self.document_share and not self.documents:
            raise ConfigError("documents is 0 but document_share is not; accepted: at least one document")


class Request(msgspec.Struct):
    """One line of a trace, as written."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    session: int
    turn: int


@dataclass(slots=True)
class _Session:
    number: int
    ids: list[int]  # of the full blocks so far
    tokens: int
    turn: int = 0


@dataclass(slots=True)
class _Shared:
    """Block numbers of the system prompt and of each document that was used."""

    ids: count[int]
    system: list[int]
    documents: dict[int, list[int]] = field(default_factory=dict)


def synthesize(shape: Shape) -> Iterator[Request]:
    """Yield `shape.requests` requests in order of time (timestamps in ms from 0)."""
    rng = random.Random(shape.seed)
    ids: count[int] = count()
    shared = _Shared(ids, [next(ids) for _ in range(shape.system_tokens // shape.block_tokens)])
    popularity = list(accumulate((rank + 1) ** -shape.zipf for rank in range(shape.documents)))
    session_rate = shape.rate_per_s / shape.turns
    opened = count()
    next_start_s = 0.0
    waiting: list[tuple[float, int, _Session]] = []
    for _ in range(shape.requests):
        while not waiting or next_start_s <= waiting[0][0]:
            session = _open_session(shape, rng, shared, popularity, next(opened))
            heappush(waiting, (next_start_s, session.number, session))
            next_start_s += rng.expovariate(session_rate)
        now_s, number, session = heappop(waiting)
        output = _length(rng, shape.output_tokens)
        session.tokens += _length(rng, shape.turn_tokens)
        session.turn += 1
        yield _request(shape, ids, session, now_s, output)
        session.tokens += output
        goes_on = rng.random() < 1 - 1 / shape.turns and session.tokens < shape.context_tokens_max
        if goes_on:
            idle_s = rng.expovariate(1 / shape.idle_s) if shape.idle_s else 0.0
            heappush(waiting, (now_s + idle_s, number, session))


def write_trace(stream: TextIO, shape: Shape) -> int:
    """Write header and requests to a text stream; return the number of requests."""
    stream.write(header_line(shape.block_tokens))
    encode = msgspec.json.encode
    written = 0
    for request in synthesize(shape):
        stream.write(encode(request).decode() + "\n")
        written += 1
    return written


def _open_session(
    shape: Shape, rng: random.Random, shared: _Shared, popularity: list[float], number: int
) -> _Session:
    if rng.random() >= shape.document_share:
        return _Session(number, list(shared.system), shape.system_tokens)
    document = bisect.bisect_left(popularity, rng.random() * popularity[-1])
    tokens = shape.system_tokens + shape.document_tokens
    if document not in shared.documents:
        more = tokens // shape.block_tokens - len(shared.system)
        shared.documents[document] = [next(shared.ids) for _ in range(more)]
    return _Session(number, shared.system + shared.documents[document], tokens)


def _request(shape: Shape, ids: count[int], session: _Session, now_s: float, output: int) -> Request:
    session.tokens = min(session.tokens, shape.context_tokens_max)
    full, rest = divmod(session.tokens, shape.block_tokens)
    session.ids.extend(next(ids) for _ in range(full - len(session.ids)))
    # An incomplete block will have other content when the next turn fills it: a number of its own.
    chain = [*session.ids, next(ids)] if rest else list(session.ids)
    return Request(round(now_s * 1000), session.tokens, output, chain, session.number, session.turn)


def _length(rng: random.Random, mean: int) -> int:
    if not mean:
        return 0
    drawn = rng.lognormvariate(math.log(mean) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA)
    return max(1, round(drawn))
