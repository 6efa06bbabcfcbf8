"""What the server needs of an engine, and the transformers engine with its store opened from a configuration.

It is the only module of the server that loads a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tiercel.blocks import Chain
from tiercel.config import Config
from tiercel.engines.transformers import Event, Request, open_engine
from tiercel.engines.transformers.chunks import Span
from tiercel.store import Hit, Overview, StoreStats
from tiercel.store.base import SessionTable
from tiercel.store.policy import Decision


class Batch(Protocol):
    """Up to `size` answers that take their steps together; `admit` gives the name of one. One thread uses it.

    A step tells whose event it was, or which exception ended it; a `Result` is an end, too.
    """

    @property
    def size(self) -> int: ...

    @property
    def full(self) -> bool: ...

    def admit(self, request: Request, stop: Callable[[], bool]) -> Any: ...

    def step(self) -> Sequence[tuple[Any, Event | Exception]]: ...

    def drop(self, member: Any) -> None: ...


class Engine(Protocol):
    """One loaded model, with one batch at a time; all else is used by other threads beside it."""

    @property
    def block_tokens(self) -> int: ...

    def chain(self, tokens: Sequence[int], salt: str | None = None) -> Chain | None: ...

    def explain(self, tokens: Sequence[int], *, salt: str | None = None) -> Decision: ...

    def encode(self, text: str) -> list[int]: ...

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...

    def cut(
        self, prompt: str | Sequence[Mapping[str, Any]], separator: str
    ) -> tuple[list[int], tuple[Span, ...]]: ...

    def batch(self) -> Batch: ...


class Store(Protocol):
    """What the server asks of a store: figures, steering, to write down and close within a deadline."""

    @property
    def sessions(self) -> SessionTable: ...

    def stats(self) -> StoreStats: ...

    def decisions(self, limit: int = 256) -> list[Decision]: ...

    def lookup(self, chain: Chain, deadline_s: float = 0.05) -> Hit: ...

    def prefetch(self, chain: Chain, deadline_s: float = 10.0) -> Future[int]: ...

    def pin(self, chain: Chain, ttl_s: float) -> int: ...

    def unpin(self, chain: Chain) -> None: ...

    def demote(self, chain: Chain, deadline_s: float = 10.0) -> int: ...

    def drop(self, chain: Chain, deadline_s: float = 10.0) -> int: ...

    def clear(self, tag: bytes | None = None, deadline_s: float = 30.0) -> int: ...

    def overview(self, limit: int = 64) -> Overview: ...

    def chain_of(self, prefix: str) -> Chain | None: ...

    def flush(self, deadline_s: float = 30.0) -> bool: ...

    def close(self, deadline_s: float = 30.0) -> bool: ...


class PolicyFigures(Protocol):
    """A selective policy of attention, and what it took so far."""

    @property
    def name(self) -> str: ...
    @property
    def share(self) -> float: ...
    @property
    def steps(self) -> int: ...
    @property
    def moved_bytes(self) -> int: ...
    @property
    def device_peak_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a client may learn of the model. `context_tokens` None: no limit of its own.

    `lossy` names what may make an answer other than one computed in full; none: what is reused is equal to
    what is computed, bit for bit.
    """

    name: str
    fingerprint: str
    context_tokens: int | None
    vocab_tokens: int
    has_tokenizer: bool
    chats: bool
    running_on: str
    lossy: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The name, with what makes answers other than exact."""
        return f"{self.name} ({', '.join(self.lossy)})" if self.lossy else self.name


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, its store, the facts about its model, and the policy of its attention, if it has one."""

    engine: Engine
    store: Store
    facts: ModelFacts
    policy: PolicyFigures | None = None


def load(model_dir: Path, config: Config, name: str | None = None) -> Loaded:
    """Load the model and open the store that `config` describes for its blocks. Blocks.

    `name` is what the model is called in the API (None: as its folder). Raises as `open_engine` does.
    """
    engine, store = open_engine(model_dir, config)
    model = engine.model
    return Loaded(
        engine,
        store,
        ModelFacts(
            name=name or model.name,
            fingerprint=f"fp_{model.revision[:12]}",
            context_tokens=model.context_tokens,
            vocab_tokens=model.vocab_tokens,
            has_tokenizer=model.tokenizer is not None,
            chats=bool(getattr(model.tokenizer, "chat_template", None)),
            running_on=f"{model.device}, {str(model.dtype).removeprefix('torch.')}",
            lossy=(*store.lossy.codecs, *engine.lossy),
        ),
        engine.selecting,
    )
