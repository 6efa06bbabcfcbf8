"""The demo from start to end: read, resume, restart, resume again, and say what came of it.

    read       every conversation's document, one after another; RAM holds about half of them
    resume     the most recent half, newest first: from RAM; then the others, longest idle first: from disk
    restart    the store is closed, a new process resumes the oldest ones from the cache directory

The first process' engine is gone before the second one loads the model, so that neither slows the other.
"""

from __future__ import annotations

import gc
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tiercel.bench.documents import Document, choose_documents, cut_to_tokens
from tiercel.blocks import Scope, record_bytes
from tiercel.config import human_bytes
from tiercel.demo.measure import Meter, warm_up
from tiercel.demo.messages import Advanced, Done, Job, Message, Ready, Saying, Took
from tiercel.demo.outcome import Fact, Gap, Outcome, Span, Turn
from tiercel.demo.place import Place, cache_place
from tiercel.demo.restart import RestartError, second_process
from tiercel.demo.settings import LOAD_DEADLINE_S, DemoSettings, store_config
from tiercel.demo.talk import Talk, new_talk
from tiercel.errors import ConfigError
from tiercel.models import NOTE, demo_model_dir
from tiercel.report.machine import machine_facts

if TYPE_CHECKING:
    from tiercel.engines.transformers import TransformersEngine

# The second process loads the model and runs what the first one ran: so long, and then generously more.
_RESTART_DEADLINE_S = 120.0
_RESTART_TIMES = 3.0
_DISK_ROOM = 1.2
_PACKAGES = ("torch", "transformers")


class Screen(Protocol):
    """Who is told of progress."""

    def steps(self, total: int) -> None: ...

    def say(self, text: str) -> None: ...

    def advance(self) -> None: ...

    def line(self, text: str) -> None: ...

    def took(self, turn: Turn) -> None: ...


@dataclass(slots=True)
class _Notebook:
    """What is collected on the way to an `Outcome`."""

    turns: list[Turn] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What one run needs, in bytes and blocks."""

    slot_bytes: int
    blocks_each: int
    ram_bytes: int


def run_demo(settings: DemoSettings, screen: Screen) -> Outcome:
    """Run the demo. Blocks for minutes. Raises TiercelError for what makes it impossible to start."""
    screen.steps(3 * settings.conversations + 2 * settings.restarted + 1)
    with cache_place(settings.cache_dir, keep=settings.keep) as place:
        notebook = _Notebook(facts=[Fact(*one) for one in machine_facts(_PACKAGES)])
        screen.say("preparing the model")
        folder = settings.model or demo_model_dir(notice=screen.line)
        origin_s, sizes, talks = _first_process(settings, screen, place, folder, notebook)
        gc.collect()
        _restart(settings, screen, place, folder, sizes, origin_s, talks, notebook)
    if settings.keep or not place.ours:
        left = "kept in" if settings.keep else "removed from"
        screen.line(f"The demo's blocks were {left} {place.path}")
    _judge(settings, notebook)
    return Outcome(
        conversations=tuple(talk.name for talk in talks),
        turns=tuple(notebook.turns),
        spans=tuple(sorted(notebook.spans, key=lambda span: span.start_s)),
        gaps=tuple(sorted(notebook.gaps, key=lambda gap: gap.start_s)),
        facts=tuple(notebook.facts),
        notes=tuple(notebook.notes),
        problems=tuple(notebook.problems),
    )


def _first_process(
    settings: DemoSettings, screen: Screen, place: Place, folder: Path, notebook: _Notebook
) -> tuple[float, _Sizes, list[Talk]]:
    """Read every document, resume every conversation; returns the start's time, the sizes and the talks."""
    from tiercel.engines.transformers import TransformersEngine
    from tiercel.store import open_store

    screen.say("loading the model")
    engine = TransformersEngine(
        folder,
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        load_deadline_s=LOAD_DEADLINE_S,
    )
    documents = _documents(settings, engine)
    place.tag = Scope(engine.identity, salt=settings.salt).tag
    sizes = _sizes(settings, engine, documents)
    place.require_room(int(settings.conversations * sizes.blocks_each * sizes.slot_bytes * _DISK_ROOM))
    config = store_config(place.path, sizes.ram_bytes, settings.block_tokens, settings.dtype)
    with open_store(config, engine.layout.payload_bytes) as store:
        engine.attach(store)
        notebook.facts += _setting_facts(settings, engine, sizes)
        screen.line(_plan_text(settings, engine, sizes))
        warm_up(engine)
        screen.advance()
        origin_s = time.monotonic()
        meter = Meter(
            engine,
            store,
            salt=settings.salt,
            answer_tokens=settings.answer_tokens,
            origin_s=origin_s,
            restarted=False,
            say=screen.say,
        )
        talks = [new_talk(lane, document) for lane, document in enumerate(documents)]
        for talk, document in zip(talks, documents, strict=True):
            _note(notebook, screen, meter.first(talk, document.text))
            screen.advance()
        recent = max(1, len(talks) // 2)
        for talk in (*reversed(talks[-recent:]), *talks[:-recent]):
            _note(notebook, screen, meter.resumed(talk, screen.advance))
        if not store.close():
            notebook.notes.append("not everything was on disk when the first process closed its store")
    notebook.spans += meter.spans
    notebook.gaps += meter.gaps
    notebook.notes += meter.notes
    return origin_s, sizes, talks


def _documents(settings: DemoSettings, engine: TransformersEngine) -> list[Document]:
    """The documents, each cut to the tokens asked for. Raises ConfigError."""
    context = engine.model.context_tokens
    if context is not None and settings.tokens + settings.growth_tokens > context:
        accepted = context - settings.growth_tokens
        raise ConfigError(
            f"--tokens {settings.tokens}: with questions and answers that is beyond the {context} tokens of "
            f"{engine.model.name}; accepted: up to {max(accepted, 0)} "
            f"with --answer-tokens {settings.answer_tokens}"
        )

    def count(text: str) -> int:
        return len(engine.encode(text))

    chosen = choose_documents(
        settings.documents, settings.conversations, settings.tokens, settings.block_tokens, count
    )
    return [
        Document(one.name, one.source, cut_to_tokens(one.text, settings.tokens, count), one.questions)
        for one in chosen
    ]


def _sizes(settings: DemoSettings, engine: TransformersEngine, documents: list[Document]) -> _Sizes:
    """How much RAM: what was asked for, or just enough for the most recent half of the conversations.

    Just enough: each one's blocks after its first turn, the block by which one may grow while others wait to
    be resumed, and the reserved slots. More would leave a part of the next conversation in RAM.
    """
    slot_bytes = record_bytes(engine.layout.payload_bytes)
    blocks_each = -(-(settings.tokens + settings.growth_tokens) // settings.block_tokens)
    reserved = store_config(Path(), 1 << 30, settings.block_tokens, settings.dtype).ram.reserved_slots
    recent = max(1, len(documents) // 2)
    prompts = [engine.chat_prompt(new_talk(0, one).ask(one.text)) for one in documents[-recent:]]
    kept = sum((len(one) + settings.answer_tokens) // settings.block_tokens for one in prompts) + recent - 1
    return _Sizes(slot_bytes, blocks_each, settings.ram_bytes or (kept + reserved) * slot_bytes)


def _plan_text(settings: DemoSettings, engine: TransformersEngine, sizes: _Sizes) -> str:
    need_bytes = settings.conversations * sizes.blocks_each * sizes.slot_bytes
    return (
        f"{settings.conversations} conversations of up to {settings.tokens:,} tokens on {engine.model.name}: "
        f"up to {human_bytes(need_bytes)} of KV, RAM tier {human_bytes(sizes.ram_bytes)}, the rest on disk"
    )


def _setting_facts(settings: DemoSettings, engine: TransformersEngine, sizes: _Sizes) -> list[Fact]:
    model, layout = engine.model, engine.layout
    note = f" ({NOTE})" if settings.model is None else ""
    dtype = str(model.dtype).removeprefix("torch.")
    return [
        Fact("model", f"{model.name}{note}"),
        Fact("computed in", f"{dtype} on {model.device}, attention {model.attention}"),
        Fact("KV", f"{layout.token_bytes:,} bytes per token, in blocks of {layout.block_tokens} tokens"),
        Fact("RAM tier", human_bytes(sizes.ram_bytes)),
        Fact("disk tier", "one file per block, direct I/O where the file system allows, else its page cache"),
        Fact("answers", f"greedy, {settings.answer_tokens} tokens at most"),
        Fact("recomputed", "same process, same code, same split into blocks; store neither read nor written"),
        Fact("first token", "lookup, loading, prefill of the rest and sampling; tokenising is left out"),
        Fact("before measuring", "each process runs two blocks of another text, neither timed nor stored"),
    ]


def _restart(
    settings: DemoSettings,
    screen: Screen,
    place: Place,
    folder: Path,
    sizes: _Sizes,
    origin_s: float,
    talks: list[Talk],
    notebook: _Notebook,
) -> None:
    """Let a second process resume the oldest conversations; its failure is a problem, not an error."""
    closed_s = time.monotonic() - origin_s
    screen.say("restarting")
    job = Job(
        model_dir=str(Path(folder).absolute()),
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        ram_bytes=sizes.ram_bytes,
        cache_dir=str(place.path.absolute()),
        salt=settings.salt,
        answer_tokens=settings.answer_tokens,
        origin_s=origin_s,
        talks=talks[: settings.restarted],
    )
    try:
        with closing(second_process(job, _RESTART_DEADLINE_S + _RESTART_TIMES * closed_s)) as messages:
            for message in messages:
                _hear(message, screen, notebook, closed_s)
    except RestartError as error:
        notebook.problems.append(f"{error}.")


def _hear(message: Message, screen: Screen, notebook: _Notebook, closed_s: float) -> None:
    """Take in one message of the second process; `closed_s` is when the first one was done."""
    match message:
        case Saying(text):
            screen.say(text)
        case Advanced():
            screen.advance()
        case Ready(at_s):
            took = f"a new process has loaded the model: {at_s - closed_s:.1f} s"
            notebook.gaps.append(Gap("restart", closed_s, at_s, f"restart, {took}"))
            screen.line(f"restart  {took}")
        case Took(turn):
            _note(notebook, screen, turn)
        case Done(spans, gaps, notes):
            notebook.spans += spans
            notebook.gaps += gaps
            notebook.notes += notes


def _note(notebook: _Notebook, screen: Screen, turn: Turn) -> None:
    notebook.turns.append(turn)
    screen.took(turn)


def _judge(settings: DemoSettings, notebook: _Notebook) -> None:
    """Add what is wrong, and what is merely worth knowing, in plain sentences."""
    rows = [row for turn in notebook.turns if (row := turn.row()) is not None]
    different = [row.name for row in rows if not row.same_answer]
    if different:
        notebook.problems.append(
            f"{len(different)} of {len(rows)} answers differ from a full recompute: {', '.join(different)}."
        )
    if len(rows) < settings.rows_expected:
        notebook.problems.append(
            f"{len(rows)} turns were resumed where {settings.rows_expected} were planned."
        )
    live = {row.source for row in rows[: settings.conversations]}
    if rows and "disk" not in live:
        notebook.notes.append(
            "before the restart no conversation came from disk: RAM held what was asked for"
        )
    if rows and "none" in {row.source for row in rows}:
        notebook.notes.append("at least one turn found nothing stored and was recomputed as a whole")
