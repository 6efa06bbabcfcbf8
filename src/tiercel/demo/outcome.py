"""What the demo measured, as plain data: one shape for both processes, the JSON file and the report.

Times are seconds; those of spans count from the start of the demo, on one clock for both processes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

RAM = "ram"
Source = Literal["none", "ram", "disk"]
Kind = Literal["prefill", "ram", "disk", "answer", "store", "compare"]


class Row(msgspec.Struct, frozen=True):
    """One resumed turn beside the same prompt recomputed. The keys of a row in the JSON file, no more."""

    name: str
    prompt_tokens: int
    reused_tokens: int
    source: Source
    ttft_cold_s: float
    ttft_s: float
    speedup: float
    same_answer: bool
    bytes_ram: int
    bytes_disk: int


class Span(msgspec.Struct, frozen=True):
    """Something that took time in one conversation's lane."""

    lane: int
    turn: int
    kind: Kind
    start_s: float
    end_s: float
    title: str


class Gap(msgspec.Struct, frozen=True):
    """A stretch in which no conversation ran: the restart, or waiting for writes to disk."""

    kind: Literal["restart", "flush"]
    start_s: float
    end_s: float
    title: str


class Turn(msgspec.Struct, frozen=True):
    """One answer and what it took.

    `lane` numbers the conversation, `number` the turn in it from 1. `blocks` counts restored blocks by where
    they lay. `expected_tokens` could have been reused: the full blocks stored by the turn before.
    `bytes_ram` were copied from RAM to the model, `bytes_disk` were read from disk on the way.
    `cold_s` is the TTFT of the same prompt with the store out of use, None where that was not run.
    """

    lane: int
    name: str
    number: int
    restarted: bool
    prompt_tokens: int
    reused_tokens: int
    expected_tokens: int
    blocks: dict[str, int]
    bytes_ram: int
    bytes_disk: int
    stored_blocks: int
    ttft_s: float
    load_s: float
    decode_s: float
    store_s: float
    settle_s: float
    question: str
    answer: str
    cold_s: float | None = None
    same_answer: bool | None = None

    @property
    def source(self) -> Source:
        """The slowest place that gave a block, or none."""
        if not self.blocks:
            return "none"
        return "ram" if set(self.blocks) == {RAM} else "disk"

    def row(self) -> Row | None:
        """The row of a resumed turn; None for a first turn, which has nothing to compare."""
        if self.cold_s is None or self.same_answer is None:
            return None
        return Row(
            name=f"{self.name}, after restart" if self.restarted else self.name,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            source=self.source,
            ttft_cold_s=self.cold_s,
            ttft_s=self.ttft_s,
            speedup=self.cold_s / self.ttft_s,
            same_answer=self.same_answer,
            bytes_ram=self.bytes_ram,
            bytes_disk=self.bytes_disk,
        )

    def source_text(self) -> str:
        """Where the blocks came from in words; a mixed turn names every place with its count."""
        if not self.blocks:
            return "nowhere"
        words = {place: place.upper() if place == RAM else place for place in self.blocks}
        if len(self.blocks) == 1:
            return words[next(iter(self.blocks))]
        return " + ".join(
            f"{words[place]} ({count})" for place, count in sorted(self.blocks.items(), reverse=True)
        )


class Fact(msgspec.Struct, frozen=True):
    """A line of how it was measured."""

    name: str
    value: str


class Outcome(msgspec.Struct, frozen=True):
    """Everything one run of the demo found. `problems` are plain sentences; none of them means success."""

    conversations: tuple[str, ...]
    turns: tuple[Turn, ...]
    spans: tuple[Span, ...]
    gaps: tuple[Gap, ...]
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row per resumed turn, in the order they ran."""
        return tuple(row for turn in self.turns if (row := turn.row()) is not None)

    @property
    def ok(self) -> bool:
        return not self.problems

    def first_turns(self) -> tuple[Turn, ...]:
        """The cold turns that stored the documents."""
        return tuple(turn for turn in self.turns if turn.number == 1)

    def summary(self) -> str:
        """One sentence with the main figures, from the rows only."""
        rows = self.rows
        if not rows:
            return "No turn was resumed, so there is nothing to compare."
        same = sum(row.same_answer for row in rows)
        parts = [
            f"{_range([row.speedup for row in rows if row.source == place])}x as fast from {word}"
            for place, word in (("ram", "RAM"), ("disk", "disk"))
            if any(row.source == place for row in rows)
        ]
        faster = f": first token {' and '.join(parts)}" if parts else ""
        answers = "every answer" if same == len(rows) else f"{same} of the answers"
        return f"{len(rows)} turns resumed{faster}; {answers} the same as in a full recompute."

    def to_json(self) -> bytes:
        """The file of `--json`: `rows` as promised, and beside them how they came about."""
        whole = {
            "ok": self.ok,
            "summary": self.summary(),
            "problems": self.problems,
            "rows": self.rows,
            "notes": self.notes,
            "measured": {fact.name: fact.value for fact in self.facts},
            "turns": self.turns,
            "timeline": {"spans": self.spans, "gaps": self.gaps},
        }
        return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low}\u2013{high}"
