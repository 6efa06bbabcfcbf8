"""What a run is asked to do: the workloads, their sizes, how requests arrive, where it ends."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tiercel.errors import ConfigError

# A request may take so long, then it counts as failed; and no more may be on their way at once.
DEADLINE_S = 300.0
IN_FLIGHT_MAX = 256
SESSIONS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Kind:
    """One workload: what it is for and its usual sizes (`tokens` of a session's first prompt)."""

    words: str
    sessions: int
    turns: int
    tokens: int
    pause_s: float


KINDS: dict[str, Kind] = {
    "chat": Kind(
        "conversations, each over a long text of its own, with pauses between turns", 2, 3, 2000, 1.0
    ),
    "document": Kind("many questions about a few long documents, in mixed order", 2, 3, 3000, 0.0),
    "agents": Kind(
        "agents with one long system prompt; every turn adds what a tool returned", 2, 4, 1500, 0.5
    ),
    "unique": Kind("prompts that share nothing: what looking and storing costs", 3, 1, 1500, 0.0),
    "overflow": Kind(
        "all conversations in turn, so that each comes back when all others went by", 6, 2, 2000, 0.0
    ),
}


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One workload of a run, per round and side. `sessions` None: as many as `duration_s` allows.

    `rate` is sessions (for `document` and `unique`: requests) a second, Poisson; None means `concurrency`
    requests at a time. `requests` and `duration_s` are per side, over all rounds.
    """

    workload: str
    sessions: int | None
    turns: int
    tokens: int
    answer_tokens: int
    pause_s: float
    rate: float | None
    concurrency: int
    requests: int | None
    duration_s: float | None
    rounds: int
    warmup: int
    deadline_s: float
    seed: int

    def requests_in(self, round_number: int) -> int | None:
        """Most requests one side sends in a round."""
        if self.requests is None:
            return None
        each, more = divmod(self.requests, self.rounds)
        return each + (round_number < more)

    @property
    def duration_per_round_s(self) -> float | None:
        """How long one side may begin requests in one round."""
        return None if self.duration_s is None else self.duration_s / self.rounds

    @property
    def single(self) -> bool:
        """Whether every session is one request, so that questions of one document are not a conversation."""
        return self.workload in ("document", "unique")

    @property
    def tokens_longest(self) -> int:
        """About how long the longest prompt with its answer is, in tokens."""
        grown = self.turns * (
            self.answer_tokens + (TOOL_TOKENS if self.workload == "agents" else QUESTION_TOKENS)
        )
        return self.tokens + (self.answer_tokens + QUESTION_TOKENS if self.single else grown)

    def described(self) -> str:
        """The sizes in a line."""
        count = (
            "as many sessions as the time allows" if self.sessions is None else f"{self.sessions} sessions"
        )
        if self.workload == "document":
            count = f"{self.sessions} documents, {self.turns} questions each"
        elif self.workload == "unique":
            count = f"{self.sessions} prompts" if self.sessions else "as many prompts as the time allows"
        elif self.turns > 1:
            count += f" of {self.turns} turns"
        how = f"{self.rate:g} a second (Poisson)" if self.rate else f"{self.concurrency} at a time"
        pause = f", pauses of {self.pause_s:g} s on average" if self.pause_s and self.turns > 1 else ""
        return (
            f"{count}, from {self.tokens:,} tokens on, answers of up to {self.answer_tokens}{pause}; {how}; "
            f"{self.rounds} round{'s' if self.rounds > 1 else ''}"
        )


# What a turn adds, roughly, in tokens.
QUESTION_TOKENS = 64
TOOL_TOKENS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The flags that hold for all workloads of a run; None takes the workload's own."""

    sessions: int | None = None
    turns: int | None = None
    tokens: int | None = None
    answer_tokens: int = 32
    pause_s: float | None = None
    rate: float | None = None
    concurrency: int = 1
    requests: int | None = None
    duration_s: float | None = None
    rounds: int = 6
    warmup: int = 2
    deadline_s: float = DEADLINE_S
    seed: int = 1

    def spec(self, workload: str) -> Spec:
        """The sizes of `workload`. Raises ConfigError for a name that is none, or sizes that are none."""
        if workload not in KINDS:
            raise ConfigError(f"--workload '{workload}' does not exist; accepted: all, {', '.join(KINDS)}")
        kind = KINDS[workload]
        turns = kind.turns if self.turns is None else self.turns
        if workload == "unique":
            turns = 1
        sessions = self.sessions
        if workload == "document":
            sessions = self.sessions or kind.sessions
            if self.requests is not None and self.turns is None:
                turns = -(-self.requests // (self.rounds * sessions))
        elif sessions is None and self.requests is not None:
            # Enough for all that is asked for.
            sessions = min(SESSIONS_MAX, -(-self.requests // (self.rounds * turns)))
            sessions = max(2, sessions) if workload == "overflow" else sessions
        elif sessions is None and (self.duration_s is None or workload == "overflow"):
            sessions = kind.sessions
        if workload == "overflow" and sessions is not None and sessions < 2:
            raise ConfigError(f"--sessions {sessions}: too few for 'overflow'; accepted: 2 or more")
        return Spec(
            workload=workload,
            sessions=sessions,
            turns=turns,
            tokens=self.tokens or kind.tokens,
            answer_tokens=self.answer_tokens,
            pause_s=kind.pause_s if self.pause_s is None else self.pause_s,
            rate=self.rate,
            concurrency=self.concurrency,
            requests=self.requests,
            duration_s=self.duration_s,
            rounds=self.rounds,
            warmup=self.warmup,
            deadline_s=self.deadline_s,
            seed=self.seed,
        )
