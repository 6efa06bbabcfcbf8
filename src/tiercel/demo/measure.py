"""Runs and times turns on one engine: with the store, and the same prompt with the store out of use.

Both ways go through the same engine and the same prefill code, cut into the same blocks. A time that was not
taken here is not in a `Turn`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tiercel.demo.outcome import RAM, Gap, Kind, Span, Turn
from tiercel.demo.talk import Talk, reusable_tokens

if TYPE_CHECKING:
    from tiercel.engines.transformers import Result, TransformersEngine
    from tiercel.store import TieredStore

Say = Callable[[str], None]

_FLUSH_DEADLINE_S = 60.0
_WARM_UP_TEXT = "The first steps of a process are slower than all later ones, so they are taken here. "
# Too short a wait to show.
_FLUSH_SHOWN_S = 0.05


class Meter:
    """Takes turns on one engine and notes what they took. `origin_s` is the demo's start, monotonic clock."""

    def __init__(
        self,
        engine: TransformersEngine,
        store: TieredStore,
        *,
        salt: str,
        answer_tokens: int,
        origin_s: float,
        restarted: bool,
        say: Say,
    ) -> None:
        self._engine, self._store = engine, store
        self._salt, self._answer_tokens = salt, answer_tokens
        self._origin_s, self._restarted, self._say = origin_s, restarted, say
        self.spans: list[Span] = []
        self.gaps: list[Gap] = []
        self.notes: list[str] = []

    def first(self, talk: Talk, text: str) -> Turn:
        """Let the model read a document and answer the first question; its blocks are stored."""
        self._say(f"reading {talk.name}")
        prompt = self._engine.chat_prompt(talk.ask(text))
        turn, result = self._cached(talk, prompt)
        talk.hear(result.text, (*prompt, *result.tokens))
        return turn

    def resumed(self, talk: Talk, advance: Callable[[], None]) -> Turn:
        """Ask the next question with the store, then once more without, and compare."""
        self._say(f"resuming {talk.name}")
        prompt = self._engine.chat_prompt(talk.ask())
        turn, result = self._cached(talk, prompt)
        advance()
        self._say(f"the same without the cache: {talk.name}")
        started_s = self._now_s()
        cold = self._run(prompt, use_cache=False)
        self._span(
            talk, "compare", started_s, self._now_s(),
            f"the same prompt recomputed, to compare: first token after {cold.timing.ttft_s:.2f} s",
        )  # fmt: skip
        advance()
        talk.hear(result.text, (*prompt, *result.tokens))
        same = cold.tokens == result.tokens
        return msgspec.structs.replace(turn, cold_s=cold.timing.ttft_s, same_answer=same)

    def flush(self, why: str) -> None:
        """Wait until everything stored is on disk, so that no write runs beside a measurement."""
        started_s = self._now_s()
        if not self._store.flush(_FLUSH_DEADLINE_S):
            self.notes.append(f"writes to disk were still under way {_FLUSH_DEADLINE_S:g} s after {why}")
        ended_s = self._now_s()
        if ended_s - started_s >= _FLUSH_SHOWN_S:
            title = f"waiting for writes to disk after {why}: {ended_s - started_s:.2f} s"
            self.gaps.append(Gap("flush", started_s, ended_s, title))

    def _cached(self, talk: Talk, prompt: list[int]) -> tuple[Turn, Result]:
        read_before = self._disk_read_bytes()
        started_s = self._now_s()
        result = self._run(prompt, use_cache=True)
        self._lay_out(talk, started_s, result)
        self.flush(f"{talk.name}, turn {talk.turn}")
        timing = result.timing
        turn = Turn(
            lane=talk.lane,
            name=talk.name,
            number=talk.turn,
            restarted=self._restarted,
            prompt_tokens=result.prompt_tokens,
            reused_tokens=result.reused_tokens,
            expected_tokens=reusable_tokens(talk.tokens, prompt, self._engine.block_tokens),
            blocks=dict(result.sources),
            bytes_ram=result.sources.get(RAM, 0) * self._engine.layout.payload_bytes,
            bytes_disk=self._disk_read_bytes() - read_before,
            stored_blocks=result.stored_blocks,
            ttft_s=timing.ttft_s,
            load_s=timing.lookup_s + timing.load_s,
            decode_s=timing.decode_s,
            store_s=timing.store_s,
            settle_s=timing.settle_s,
            question=talk.question,
            answer=result.text,
        )
        self._note_recomputed(turn)
        return turn, result

    def _note_recomputed(self, turn: Turn) -> None:
        missing = turn.expected_tokens - turn.reused_tokens
        if missing > 0:
            self.notes.append(
                f"{turn.name}, turn {turn.number}: {missing:,} stored tokens did not come back, "
                "so they were recomputed"
            )
        if turn.number == 1 and turn.reused_tokens:
            self.notes.append(
                f"{turn.name}: its first turn found {turn.reused_tokens:,} tokens already stored"
            )

    def _run(self, prompt: list[int], *, use_cache: bool) -> Result:
        from tiercel.engines.transformers import Request, Result

        request = Request(prompt, max_new_tokens=self._answer_tokens, salt=self._salt, use_cache=use_cache)
        *_, last = self._engine.generate(request)
        assert isinstance(last, Result)
        return last

    def _disk_read_bytes(self) -> int:
        return sum(tier.counters.read_bytes for tier in self._store.stats().tiers)

    def _now_s(self) -> float:
        return time.monotonic() - self._origin_s

    def _lay_out(self, talk: Talk, started_s: float, result: Result) -> None:
        """Turn a result's durations into spans, in the order in which the engine does things."""
        timing, at_s = result.timing, started_s
        places = [place for place in result.sources if place != RAM]
        source: Kind = "disk" if places else "ram"
        restored = f"{result.reused_tokens:,} tokens restored from {'disk' if places else 'RAM'}"
        computed = f"{result.prompt_tokens - result.reused_tokens:,} tokens computed"
        load_s = timing.lookup_s + timing.load_s if result.reused_tokens else 0.0
        parts: tuple[tuple[Kind, float, str], ...] = (
            (source, load_s, restored),
            ("prefill", timing.prefill_s, computed),
            ("store", timing.store_s, "prompt's blocks stored"),
            ("answer", timing.decode_s, f"answer, {len(result.tokens)} tokens"),
            ("store", timing.settle_s, "answer's blocks settled and stored"),
        )
        for kind, duration_s, what in parts:
            if duration_s > 0:
                self._span(talk, kind, at_s, at_s + duration_s, f"{what} in {duration_s:.3f} s")
                at_s += duration_s

    def _span(self, talk: Talk, kind: Kind, start_s: float, end_s: float, what: str) -> None:
        self.spans.append(
            Span(talk.lane, talk.turn, kind, start_s, end_s, f"{talk.name}, turn {talk.turn}: {what}")
        )


def warm_up(engine: TransformersEngine) -> None:
    """Run two blocks and a token that nothing measures or stores: a library's first call sets itself up."""
    from tiercel.engines.transformers import Request

    text = _WARM_UP_TEXT * (engine.block_tokens // 8)
    tokens = engine.encode(text)[: engine.block_tokens * 2]
    for _ in engine.generate(Request(tokens, max_new_tokens=2, use_cache=False)):
        pass
