"""One request as it was measured, as plain data. It holds no text of a prompt or an answer, only digests."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

INTERRUPTED = "interrupted"


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Times in seconds; `start_s` from the start of its round.

    `start_s` is when it was meant to be sent: with an arrival rate, latencies count from there, however late
    the client or server made it. `late_s` is how much later it was sent. Failed requests have a `fault` and
    no latencies. `usage`: the server counted the tokens; else they are pieces of the stream.
    """

    round: int
    session: int
    turn: int
    again: bool
    start_s: float
    late_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int = 0
    usage: bool = False
    prompt: str = ""
    answer: str = ""
    fault: str = ""

    @property
    def name(self) -> tuple[int, int, int]:
        """What the same request of another side, or another run of the same plan, is found by."""
        return self.round, self.session, self.turn


def digest(text: str) -> str:
    """What two equal texts have in common and nobody can read."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def answered(samples: Sequence[Sample]) -> list[Sample]:
    """Those without a fault."""
    return [one for one in samples if not one.fault]
