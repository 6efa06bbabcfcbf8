"""What the demo's two processes tell each other: a job on stdin, then one JSON message per line on stdout."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tiercel.demo.outcome import Gap, Span, Turn
from tiercel.demo.talk import Talk

LINE_BYTES_MAX = 8 << 20


class Job(msgspec.Struct, frozen=True):
    """What the second process is to do: resume `talks` from what lies in `cache_dir`.

    `origin_s` is the start of the demo on the monotonic clock, which is the same for all processes.
    """

    model_dir: str
    dtype: str
    block_tokens: int
    ram_bytes: int
    cache_dir: str
    salt: str
    answer_tokens: int
    origin_s: float
    talks: list[Talk]


class Saying(msgspec.Struct, frozen=True, tag="saying"):
    """What is being done now."""

    text: str


class Advanced(msgspec.Struct, frozen=True, tag="advanced"):
    """One more step of the whole is done."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded, `at_s` after the start of the demo."""

    at_s: float


class Took(msgspec.Struct, frozen=True, tag="took"):
    """A turn is done."""

    turn: Turn


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Everything is done; nothing follows."""

    spans: list[Span]
    gaps: list[Gap]
    notes: list[str]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It cannot go on, in one line; nothing follows."""

    reason: str


Message: TypeAlias = Saying | Advanced | Ready | Took | Done | Failed
