"""A whole evaluation: every task and seed, all settings on the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiercel.eval.figures import row_of
from tiercel.eval.judge import Outcome, encode, judge
from tiercel.eval.results import DROPS, EXACT, SKIPS, STORED, Row
from tiercel.eval.samples import Filler, Sample, Task
from tiercel.eval.speed import Speed, speed_of

if TYPE_CHECKING:
    from tiercel.attention.policy import Policy
    from tiercel.attention.running import Setting, TeacherForced


@dataclass(frozen=True, slots=True)
class Judged:
    """The model to judge with. `context_tokens` None: no limit."""

    forced: TeacherForced
    tokenizer: Any
    context_tokens: int | None


# progress(task, seed): told before each sample.
Progress = Callable[[str, int], None]


def evaluate(
    model: Judged, policies: Sequence[Policy], budgets: Sequence[float], tasks: Sequence[Task],
    seeds: Sequence[int], filler: Filler, progress: Progress = lambda task, seed: None,
    *, speed: bool = False,
) -> list[Row]:  # fmt: skip
    """The rows, by task, in the order of the policies. Full attention is always run, as the reference.
    With `speed` each setting also generates a short answer to the first text of each task.

    Raises RequestError for a task that does not fit the model's context.
    """
    settings = settings_of(policies, budgets)
    shown = [
        number for number, one in enumerate(settings) if number or any(p.name == "full" for p in policies)
    ]
    rows = []
    for task in tasks:
        outcomes: list[list[Outcome]] = [[] for _ in settings]
        prefills = []
        for seed in seeds:
            progress(task.name, seed)
            made = task.make(seed, filler)
            found, prefill_s = judge(model.forced, model.tokenizer, made, settings, model.context_tokens)
            prefills.append(prefill_s)
            for mine, one in zip(outcomes, found, strict=True):
                mine.append(one)
        speeds = _speeds(model, settings, task.make(seeds[0], filler)) if speed else [None] * len(settings)
        rows += [
            row_of(
                settings[number].policy.name, kind_of(settings[number].policy), task.name, task.dense,
                settings[number].share, outcomes[number], outcomes[0], prefills, speeds[number],
            )
            for number in shown
        ]  # fmt: skip
    return rows


def _speeds(model: Judged, settings: Sequence[Setting], sample: Sample) -> list[Speed | None]:
    encoded = encode(sample, model.tokenizer, model.context_tokens)
    return [speed_of(model.forced, model.tokenizer, encoded, setting) for setting in settings]


def settings_of(policies: Sequence[Policy], budgets: Sequence[float]) -> list[Setting]:
    """Full attention first, then each policy with each budget; those that have none, once."""
    from tiercel.attention.running import Setting
    from tiercel.attention.window import Full

    settings = [Setting(Full(), 1.0)]
    for policy in policies:
        if kind_of(policy) == STORED:
            settings.append(Setting(policy, 1.0))
        elif policy.name != "full":
            settings += [Setting(policy, budget) for budget in budgets]
    return settings


def kind_of(policy: Policy) -> str:
    """exact, drops, skips or stored."""
    from tiercel.attention.stored import Stored

    if policy.name == "full":
        return EXACT
    if isinstance(policy, Stored):
        return STORED
    return DROPS if policy.drops else SKIPS
