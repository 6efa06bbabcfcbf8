"""Whether somebody agreed to what changes answers: by saying so, or with the report of an evaluation of it.

A report is what `tiercel eval --json` writes: `{"model": NAME, "revision": DIGEST, "rows": [{"policy":
"int8", "budget": 1.0, ...}, ...]}`. That a row is there is enough: whether its figures are good is for
whoever names the file. Nothing here looks at a block.
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from math import isclose
from pathlib import Path

from tiercel.blocks import Identity
from tiercel.codecs.mark import LossyTiers
from tiercel.codecs.names import LOSSY
from tiercel.config import Config
from tiercel.errors import ConfigError, EngineError

_YES = ("yes", "true", "1")
_NO = ("no", "false", "0")
_REPORT_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class LossyAttention:
    """A selective policy of attention, by name, with its share of a prompt's tokens.

    `models` are those it was judged for, as in `LossyTiers`; None: it was accepted unseen.
    """

    policy: str
    share: float
    models: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.policy}@{self.share:g}"

    def check(self, identity: Identity) -> None:
        """Raise EngineError unless it was accepted for this model."""
        _check(f"policy '{self}'", self.models, identity)


@dataclass(frozen=True, slots=True)
class LossyChunks:
    """Reuse of chunks, as the setting says it; `models` as above."""

    setting: str
    models: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"chunks-{self.setting}"

    def check(self, identity: Identity) -> None:
        """Raise EngineError unless it was accepted for this model."""
        _check(f"'{self}'", self.models, identity)


def _check(what: str, models: tuple[str, ...] | None, identity: Identity) -> None:
    if not LossyTiers((), models).allows(identity):
        raise EngineError(
            f"{what} changes answers and was judged for {', '.join(models or ())}, not for model "
            f"'{identity.model}'; accepted: --accept-lossy, or a report for this model"
        )


@dataclass(frozen=True, slots=True)
class _Report:
    """The model that a report is about, and what it judges: names, each with a share of tokens."""

    model: str
    judged: tuple[tuple[str, float], ...]

    def judges(self, name: str, share: float | None = None) -> bool:
        return any(
            one == name and (share is None or isclose(share, at, abs_tol=1e-9)) for one, at in self.judged
        )


def lossy_tiers(config: Config) -> LossyTiers:
    """The lossy codecs of a configuration's tiers. Raises ConfigError unless they were accepted."""
    codecs = tuple(sorted({tier.codec for tier in config.tiers if tier.codec in LOSSY}))
    if not codecs:
        return LossyTiers()
    number, name = next((i, one.codec) for i, one in enumerate(config.tiers) if one.codec in LOSSY)
    report = _agreed(config, f"tiers.{number}.codec = {name}", f"'{name}'")
    for codec in codecs:
        if report is not None and not report.judges(codec):
            raise ConfigError(_silent(config, f"codec '{codec}'", f"'{name}'"))
    return LossyTiers(codecs, None if report is None else (report.model,))


def lossy_attention(config: Config) -> LossyAttention | None:
    """The selective policy of a configuration, if any. Raises ConfigError unless it was accepted."""
    policy, share = config.attention.policy, config.attention.budget
    if policy == "full":
        return None
    what = f"'{policy}' with budget {share:g}"
    report = _agreed(config, f"attention.policy = {policy}", what)
    if report is not None and not report.judges(policy, share):
        raise ConfigError(_silent(config, f"policy {what}", what))
    return LossyAttention(policy, share, None if report is None else (report.model,))


def lossy_chunks(config: Config) -> LossyChunks | None:
    """The reuse of chunks that a configuration asks for. Raises ConfigError unless it was accepted."""
    asked = LossyChunks(config.attention.chunks)
    if asked.setting == "no":
        return None
    report = _agreed(config, f"attention.chunks = {asked.setting}", f"'{asked}'")
    if report is not None and not report.judges(str(asked)):
        raise ConfigError(_silent(config, f"'{asked}'", f"'{asked}'"))
    return asked if report is None else LossyChunks(asked.setting, (report.model,))


def _agreed(config: Config, setting: str, what: str) -> _Report | None:
    """The report that speaks for a setting; None: it was accepted unseen. Raises ConfigError for neither."""
    answer = config.store.accept_lossy
    if answer.lower() in _YES:
        return None
    if answer.lower() in _NO:
        raise ConfigError(f"{setting} changes answers; {_accepted(what)}")
    return _read(Path(answer))


def _accepted(what: str) -> str:
    return (
        "accepted: --accept-lossy (store.accept_lossy = yes), or store.accept_lossy = FILE, the report of an "
        f"evaluation of {what} with the model"
    )


def _silent(config: Config, subject: str, what: str) -> str:
    return f"store.accept_lossy: {config.store.accept_lossy} says nothing of {subject}; {_accepted(what)}"


def _read(path: Path) -> _Report:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise ConfigError(f"store.accept_lossy: {path} is no file; accepted: yes, no, or a report's file")
        if status.st_size > _REPORT_BYTES_MAX:
            raise ConfigError(f"store.accept_lossy: {path} is too large for a report")
        report = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "is not JSON"
        raise ConfigError(
            f"store.accept_lossy: {path}: {reason}; accepted: yes, no, or the file of a report"
        ) from None
    if not isinstance(report, dict) or not isinstance(report.get("model"), str):
        raise ConfigError(f"store.accept_lossy: {path} names no model; accepted: a report of an evaluation")
    revision, rows = report.get("revision"), report.get("rows")
    model = f"{report['model']}@{revision}" if isinstance(revision, str) else str(report["model"])
    return _Report(model, tuple(_judged(rows if isinstance(rows, list) else [])))


def _judged(rows: list[object]) -> list[tuple[str, float]]:
    found = []
    for row in rows:
        if isinstance(row, dict) and isinstance(name := row.get("policy"), str):
            budget = row.get("budget", 1.0)
            known = isinstance(budget, int | float) and 0 <= budget <= 1
            found.append((name, float(budget) if known else 0.0))
    return found
