"""Answers to several requests at once: each reads its prompt alone, all decode together, step by step.

    batch = engine.batch()
    member = batch.admit(request)
    while len(batch):
        for member, said in batch.step():   # an event, or the exception that ended this member
            ...

Members come and go between steps. What is not shared is done for one member a step, so that the others wait
for no more than that: a block of a prompt, or of an answer that is out and is settled (all of it where caches
share the device's memory). Nor does one that stores wait for room in RAM while there are others. What is
stored is what an engine of one answer at a time stores: prompts and settled answers never share a step. One
thread uses a batch, and nothing else uses its engine meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

from tiercel.engines.transformers.answer import Stopped
from tiercel.engines.transformers.answering import Moves, Pause, Step
from tiercel.engines.transformers.request import Delta, Event, Request
from tiercel.errors import ModelError, RequestError

if TYPE_CHECKING:
    from tiercel.engines.transformers.engine import TransformersEngine

_T = TypeVar("_T")
Said = Event | Exception


def _never() -> bool:
    return False


class Phase(Enum):
    """What a member's next move is."""

    PROMPT = auto()
    DECODING = auto()
    SETTLING = auto()
    ENDED = auto()


class Member:
    """One request in a batch."""

    def __init__(self, request: Request, moves: Moves) -> None:
        self.request, self.moves = request, moves
        self.phase = Phase.PROMPT

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.phase is Phase.ENDED


class Batch:
    """Up to `size` answers of `engine` at a time. Raises ModelError for more than the engine was made for."""

    def __init__(self, engine: TransformersEngine, size: int) -> None:
        if not 1 <= size <= engine.batch_size:
            raise ModelError(
                f"a batch of {size} answers; this engine was made for 1 to {engine.batch_size} at a time"
            )
        self._engine, self.size = engine, size
        self._members: list[Member] = []

    def __len__(self) -> int:
        return len(self._members)

    @property
    def full(self) -> bool:
        """Whether nobody more is admitted for now."""
        return len(self._members) >= self.size

    def admit(self, request: Request, stop: Callable[[], bool] = _never) -> Member:
        """Take a request in. Its prompt is read in one of the next steps, `stop` being asked before a block.

        Raises RequestError at once if it cannot be served, or the batch is full.
        """
        if self.full:
            raise RequestError(f"{len(self)} requests are being answered; accepted are {self.size} at a time")
        member = Member(request, self._engine.answering(request, stop, lambda: len(self) == 1))
        self._members.append(member)
        return member

    def step(self) -> list[tuple[Member, Said]]:
        """Do what one member needs for itself, and run the next token of all that decode.

        Returns what came of it: an event, or the exception that ended a member, `Stopped` where a prompt was
        given up. A `Result` is an end, too. Who fails leaves the others as they are; what fails in the step
        itself ends all who took part in it.
        """
        decoding = [member for member in self._members if member.phase is Phase.DECODING]
        said: list[tuple[Member, Said]] = []
        if (alone := self._next_alone()) is not None:
            move = _tried(next, alone.moves)
            if not isinstance(move, Pause):
                said.append((alone, _event(move)))
        said += self._decoded(decoding)
        for member, one in said:
            if not isinstance(one, Delta):
                self.drop(member)
            else:
                member.phase = Phase.DECODING if one.finish_reason is None else Phase.SETTLING
        return said

    def drop(self, member: Member) -> None:
        """Let a member go: what it holds is given back, and what was prefilled is stored."""
        if not member.ended:
            member.phase = Phase.ENDED
            self._members.remove(member)
            member.moves.close()

    def close(self) -> None:
        """Let everybody go."""
        for member in list(self._members):
            self.drop(member)

    def _next_alone(self) -> Member | None:
        """Whose answer is out goes first: it makes room."""
        for phase in (Phase.SETTLING, Phase.PROMPT):
            for member in self._members:
                if member.phase is phase:
                    return member
        return None

    def _decoded(self, members: Sequence[Member]) -> list[tuple[Member, Said]]:
        said: list[tuple[Member, Said]] = []
        ready: list[tuple[Member, Step]] = []
        for member in members:
            step = _tried(_next_step, member.moves)
            if isinstance(step, Step):
                ready.append((member, step))
            else:
                said.append((member, step))
        if not ready:
            return said
        rows = _tried(self._engine.run_together, [step for _, step in ready])
        if isinstance(rows, Exception):
            return [*said, *((member, rows) for member, _ in ready)]
        for (member, _), logits in zip(ready, rows, strict=True):
            said.append((member, _event(_tried(member.moves.send, logits))))
        return said


def answers(batch: Batch, requests: Sequence[Request]) -> Iterator[tuple[int, Event]]:
    """Answer `requests`: a request's place among them, with an event of its answer, as they come.

    The next one is taken as soon as one has ended. A fault that ends one is raised once all others are done.
    """
    waiting = deque(enumerate(requests))
    places: dict[Member, int] = {}
    faults: list[Exception] = []
    with closing(batch):
        while waiting or len(batch):
            while waiting and not batch.full:
                place, request = waiting.popleft()
                places[batch.admit(request)] = place
            for member, said in batch.step():
                if isinstance(said, Exception):
                    faults.append(said)
                else:
                    yield places[member], said
    if faults:
        raise faults[0]


def _next_step(moves: Moves) -> Step:
    """What is to be run next, with room for it: memory that runs out then ends this answer alone."""
    step = next(moves)
    assert isinstance(step, Step)
    step.cache.make_room()
    return step


def _event(move: Event | Step | Pause | Exception) -> Said:
    assert not isinstance(move, Step | Pause)
    return move


def _tried(call: Callable[..., _T], *given: object) -> _T | Exception:
    try:
        return call(*given)
    except StopIteration:
        return Stopped()
    except Exception as fault:  # noqa: BLE001 (whatever ends one answer must not end the others)
        return fault
