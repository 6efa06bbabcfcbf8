"""The demo on a screen: progress while it runs, then the table. Without a terminal: plain lines, no bars."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from tiercel.config import human_bytes
from tiercel.demo.outcome import Outcome, Turn
from tiercel.report.console import one_line


class ConsoleScreen:
    """Shows progress on `console`. Use it as a context: the bar goes away at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._progress = Progress(
            SpinnerColumn(),
            # Names of documents are the user's: never read as markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def steps(self, total: int) -> None:
        """Say how many steps there are."""
        self._progress.update(self._task, total=total)

    def say(self, text: str) -> None:
        """What is being done now; a line of its own where there is no bar to write it on."""
        self._progress.update(self._task, description=one_line(text))
        if not self._live:
            self.line(f"... {text}")

    def advance(self) -> None:
        """One step is done."""
        self._progress.advance(self._task)

    def line(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(one_line(text)), soft_wrap=True)

    def took(self, turn: Turn) -> None:
        """A turn and its figures."""
        self.line(turn_text(turn))


def turn_text(turn: Turn) -> str:
    """One finished turn in a line."""
    if turn.cold_s is None:
        spent_s = turn.store_s + turn.settle_s
        return (
            f"read     {turn.name}: {turn.prompt_tokens:,} tokens, first token after {turn.ttft_s:.2f} s; "
            f"storing {turn.stored_blocks} blocks cost {spent_s:.3f} s"
        )
    same = "same answer" if turn.same_answer else "DIFFERENT ANSWER"
    return (
        f"resumed  {turn.name}: {turn.reused_tokens:,} of {turn.prompt_tokens:,} tokens "
        f"from {turn.source_text()}, "
        f"first token after {turn.ttft_s:.3f} s; recomputed {turn.cold_s:.2f} s, {same}"
    )


def result_table(outcome: Outcome) -> Table:
    """The table of resumed turns."""
    table = Table(title="Resumed conversations", title_justify="left", header_style="bold")
    table.add_column("conversation", overflow="fold")
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("reused\ntokens", justify="right")
    table.add_column("from where")
    table.add_column("TTFT\ncold", justify="right")
    table.add_column("TTFT\nresumed", justify="right")
    table.add_column("speed-up", justify="right")
    table.add_column("same\nanswer")
    for turn in outcome.turns:
        row = turn.row()
        if row is None:
            continue
        table.add_row(
            Text(one_line(row.name)),
            f"{row.prompt_tokens:,}",
            f"{row.reused_tokens:,}",
            turn.source_text(),
            f"{row.ttft_cold_s:.2f} s",
            f"{row.ttft_s:.3f} s",
            f"{row.speedup:.1f}x",
            Text("yes", style="green") if row.same_answer else Text("no", style="bold red"),
        )
    return table


def store_cost_text(outcome: Outcome) -> str:
    """What storing cost the cold first turns, in a line; empty when there were none."""
    firsts = outcome.first_turns()
    if not firsts:
        return ""
    spent_s = sum(turn.store_s + turn.settle_s for turn in firsts)
    whole_s = sum(turn.ttft_s + turn.decode_s for turn in firsts) + spent_s
    return (
        f"Storing cost the {len(firsts)} first turns {spent_s:.2f} s of {whole_s:.1f} s "
        f"({spent_s / whole_s:.1%})."
    )


def moved_text(outcome: Outcome) -> str:
    """How many bytes the resumed turns moved, in a line."""
    ram, disk = sum(row.bytes_ram for row in outcome.rows), sum(row.bytes_disk for row in outcome.rows)
    return f"Moved for the resumed turns: {human_bytes(ram)} from RAM, {human_bytes(disk)} from disk."


def show(outcome: Outcome, console: Console) -> None:
    """Print table, summary, notes and problems."""
    console.print()
    if outcome.rows:
        console.print(result_table(outcome))
    for line in (store_cost_text(outcome), moved_text(outcome) if outcome.rows else ""):
        if line:
            console.print(Text(line), soft_wrap=True)
    for note in outcome.notes:
        console.print(Text(one_line(f"Note: {note}.")), soft_wrap=True)
    console.print(Text(one_line(outcome.summary()), style="bold"), soft_wrap=True)
    for problem in outcome.problems:
        console.print(Text(one_line(f"Not as it should be: {problem}"), style="bold red"), soft_wrap=True)
